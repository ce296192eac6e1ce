// Run at configure time: shows that this libtorch compiles, links and loads here, and that both sides agree about std::string.
#include <ATen/Version.h>
#include <c10/util/Exception.h>

#include <iostream>

int main() {
  const c10::Error error({__func__, __FILE__, __LINE__}, "strings cross the border");
  const bool has_gloo = at::show_config().find("USE_GLOO=0") == std::string::npos;
  std::cout << (error.msg() == "strings cross the border" ? "fits this compiler" : "differs from this compiler's")
            << (has_gloo ? ", gloo" : "") << '\n';
}
