// PJRT plugins that nobody can use: KIND says why.
#include <pjrt_c_api.h>

#include <cstddef>

namespace {

enum Kind { Old, OtherVersion, TooShort };

PJRT_Api table() {
  PJRT_Api api{};
  api.struct_size = KIND == Old ? offsetof(PJRT_Api, PJRT_Client_Create) : KIND == TooShort ? sizeof(size_t) : sizeof(PJRT_Api);
  api.pjrt_api_version.major_version = PJRT_API_MAJOR + (KIND == OtherVersion ? 7 : 0);
  api.PJRT_Error_Destroy = [](PJRT_Error_Destroy_Args*) {};
  api.PJRT_Error_Message = [](PJRT_Error_Message_Args*) {};
  api.PJRT_Error_GetCode = [](PJRT_Error_GetCode_Args*) -> PJRT_Error* { return nullptr; };
  return api;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const PJRT_Api* GetPjrtApi() {
  static const auto api = table();
  return &api;
}
