// Run at configure time: shows that this libtorch compiles, links and loads here, and that both sides agree about std::string.
#include <ATen/Version.h>
#include <c10/util/Exception.h>

#include <iostream>

int main() {
  const c10::Error error({__func__, __FILE__, __LINE__}, "strings cross the border");
  const bool has_gloo = at::show_config().find("USE_GLOO=0") == std::string::npos;
  if (error.msg() != "strings cross the border") return 1;
  std::cout << "fits this compiler" << (has_gloo ? ", gloo" : "") << '\n';
}
