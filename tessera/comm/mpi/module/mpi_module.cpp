// The calls of one MPI library, as a module that depends on nothing of Tessera's. It is compiled once for each library.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <mpi.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>
#include <map>
#include <stdexcept>
#include <vector>

#include "tessera/comm/mpi/mpi_calls.h"

namespace {

using namespace tessera;

void expect(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw std::runtime_error(std::string(call) + ": " + std::string(text.data(), static_cast<size_t>(length)));
}

/// The libraries' handles are pointers or numbers; either fits into an MpiHandle.
template <class Native>
Native native_of_handle(MpiHandle handle) {
  Native native{};
  static_assert(sizeof native <= sizeof handle);
  std::memcpy(&native, &handle, sizeof native);
  return native;
}
MPI_Comm comm(MpiHandle handle) {
  return native_of_handle<MPI_Comm>(handle);
}
template <class Native>
MpiHandle handle_of(Native native) {
  MpiHandle handle = 0;
  static_assert(sizeof native <= sizeof handle);
  std::memcpy(&handle, &native, sizeof native);
  return handle;
}

/// Describes a number of bytes to MPI, which counts in int: more of them are one value of a type that is made for them.
class Run {
 public:
  explicit Run(size_t bytes) {
    if (bytes <= INT_MAX) {
      count = static_cast<int>(bytes);
      return;
    }
    constexpr size_t kBlock = size_t{1} << 30;
    MPI_Datatype block = MPI_DATATYPE_NULL;
    expect(MPI_Type_contiguous(static_cast<int>(kBlock), MPI_BYTE, &block), "MPI_Type_contiguous");
    const std::array lengths = {static_cast<int>(bytes / kBlock), static_cast<int>(bytes % kBlock)};
    const std::array places = {MPI_Aint{0}, static_cast<MPI_Aint>(bytes / kBlock * kBlock)};
    const std::array types = {block, MPI_BYTE};
    expect(MPI_Type_create_struct(2, lengths.data(), places.data(), types.data(), &type), "MPI_Type_create_struct");
    MPI_Type_free(&block);
    expect(MPI_Type_commit(&type), "MPI_Type_commit");
    is_own_ = true;
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;
  ~Run() {
    if (is_own_) MPI_Type_free(&type);  // MPI keeps it until calls under way have ended
  }

  int count = 1;
  MPI_Datatype type = MPI_BYTE;

 private:
  bool is_own_ = false;
};

template <class T, MpiOp op>
void combine(void* in, void* inout, int* count, MPI_Datatype* /*type*/) {
  const auto* a = static_cast<const T*>(in);
  auto* b = static_cast<T*>(inout);
  for (int i = 0; i < *count; i++) {
    const float x = a[i], y = b[i];
    b[i] = op == MpiOp::Sum ? x + y : op == MpiOp::Min ? std::min(x, y) : std::max(x, y);
  }
}

class Library final : public MpiCalls {
 public:
  std::string version() override {
    std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
    int length = 0;
    expect(MPI_Get_library_version(text.data(), &length), "MPI_Get_library_version");
    const std::string all(text.data(), static_cast<size_t>(length));
    return all.substr(0, all.find_first_of(",\n"));
  }
  bool is_started() override { return flag(MPI_Initialized, "MPI_Initialized"); }
  bool is_finished() override { return flag(MPI_Finalized, "MPI_Finalized"); }
  bool any_thread_may_call() override { return level() >= MPI_THREAD_MULTIPLE; }
  bool one_thread_may_call() override { return level() >= MPI_THREAD_FUNNELED; }
  void start() override {
    int level = 0;
    expect(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    // Some errors of calls under way are not those of their communicator.
    for (const auto all : {MPI_COMM_WORLD, MPI_COMM_SELF}) MPI_Comm_set_errhandler(all, MPI_ERRORS_RETURN);
  }
  void finish() override { expect(MPI_Finalize(), "MPI_Finalize"); }
  void before_finish(std::function<void()> then) override {
    before_finish_ = std::move(then);
    const auto call = [](MPI_Comm, int, void* library, void*) {
      static_cast<Library*>(library)->end();
      return MPI_SUCCESS;
    };
    int key = 0;
    expect(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, call, &key, nullptr), "MPI_Comm_create_keyval");
    expect(MPI_Comm_set_attr(MPI_COMM_SELF, key, this), "MPI_Comm_set_attr");  // MPI_Finalize removes it first of all
  }

  MpiHandle world() override { return handle_of(MPI_COMM_WORLD); }
  int rank(MpiHandle communicator) override {
    int rank = 0;
    expect(MPI_Comm_rank(comm(communicator), &rank), "MPI_Comm_rank");
    return rank;
  }
  int size(MpiHandle communicator) override {
    int size = 0;
    expect(MPI_Comm_size(comm(communicator), &size), "MPI_Comm_size");
    return size;
  }
  MpiHandle duplicate(MpiHandle communicator) override {
    MPI_Comm made = MPI_COMM_NULL;
    expect(MPI_Comm_dup(comm(communicator), &made), "MPI_Comm_dup");
    return own(made);
  }
  MpiHandle part(MpiHandle communicator, std::span<const int> ranks) override {
    MPI_Group all = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
    expect(MPI_Comm_group(comm(communicator), &all), "MPI_Comm_group");
    const int code = MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some);
    MPI_Group_free(&all);
    expect(code, "MPI_Group_incl");
    MPI_Comm made = MPI_COMM_NULL;
    const int created = MPI_Comm_create_group(comm(communicator), some, 0, &made);
    MPI_Group_free(&some);
    expect(created, "MPI_Comm_create_group");
    return own(made);
  }
  void release(MpiHandle communicator) override {
    auto native = comm(communicator);
    expect(MPI_Comm_free(&native), "MPI_Comm_free");
  }

  MpiPending send(std::span<const std::byte> bytes, int rank, int tag, MpiHandle communicator) override {
    const Run run(bytes.size());
    return pending("MPI_Isend", MPI_Isend, bytes.data(), run.count, run.type, rank, within(tag, communicator), comm(communicator));
  }
  MpiPending receive(std::span<std::byte> bytes, int rank, int tag, MpiHandle communicator) override {
    const Run run(bytes.size());
    return pending("MPI_Irecv", MPI_Irecv, bytes.data(), run.count, run.type, rank, within(tag, communicator), comm(communicator));
  }
  MpiPending all_gather(std::span<const std::byte> own, std::byte* whole, MpiHandle communicator) override {
    const Run run(own.size());
    const bool in_place = own.data() == whole + static_cast<size_t>(rank(communicator)) * own.size();
    const void* from = in_place ? MPI_IN_PLACE : own.data();
    return pending("MPI_Iallgather", MPI_Iallgather, from, run.count, run.type, whole, run.count, run.type, comm(communicator));
  }
  MpiPending broadcast(std::span<std::byte> bytes, int root, MpiHandle communicator) override {
    // In parts, because MPICH 4.0 reports an error for more than 2 GiB, whatever their type.
    std::vector<MpiHandle> parts;
    do {
      const auto part = bytes.first(std::min<size_t>(bytes.size(), INT_MAX));
      bytes = bytes.subspan(part.size());
      parts.push_back(
          *pending("MPI_Ibcast", MPI_Ibcast, part.data(), static_cast<int>(part.size()), MPI_BYTE, root, comm(communicator)));
    } while (!bytes.empty());
    for (size_t i = 1; i < parts.size(); i++) next_parts_[parts[i - 1]] = parts[i];
    return parts.front();
  }
  MpiPending all_reduce(void* values, size_t count, MpiType type, MpiOp op, MpiHandle communicator) override {
    const auto [native, with] = native_of(type, op);
    return pending("MPI_Iallreduce", MPI_Iallreduce, MPI_IN_PLACE, values, as_int(count), native, with, comm(communicator));
  }
  MpiPending reduce_scatter(const void* whole, void* own, size_t own_count, MpiType type, MpiOp op, MpiHandle communicator) override {
    const auto [native, with] = native_of(type, op);
    return pending("MPI_Ireduce_scatter_block", MPI_Ireduce_scatter_block, whole, own, as_int(own_count), native, with, comm(communicator));
  }

  bool test(MpiHandle& request) override {
    int ended = 0;
    auto native = native_of_handle<MPI_Request>(request);
    expect(MPI_Test(&native, &ended, MPI_STATUS_IGNORE), "MPI_Test");
    if (ended != 0) {
      if (const auto next = next_parts_.extract(request)) {
        request = next.mapped();
        return false;
      }
    }
    request = handle_of(native);
    return ended != 0;
  }
  void progress() override {
    int found = 0;
    expect(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE), "MPI_Iprobe");
  }

 private:
  static bool flag(int (*call)(int*), const char* name) {
    int set = 0;
    expect(call(&set), name);
    return set != 0;
  }
  static int level() {
    int level = 0;
    expect(MPI_Query_thread(&level), "MPI_Query_thread");
    return level;
  }
  static MpiHandle own(MPI_Comm made) {
    expect(MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    return handle_of(made);
  }
  static int within(int tag, MpiHandle communicator) {
    void* most = nullptr;
    int known = 0;
    expect(MPI_Comm_get_attr(comm(communicator), MPI_TAG_UB, &most, &known), "MPI_Comm_get_attr");
    if (known != 0 && tag > *static_cast<int*>(most)) throw std::runtime_error("this MPI has no tags for so many groups");
    return tag;
  }
  static int as_int(size_t count) {
    if (count > kMostValues) throw std::runtime_error("MPI can't add so many values at once");
    return static_cast<int>(count);
  }
  template <class Call, class... Arguments>
  static MpiPending pending(const char* name, Call call, Arguments... arguments) {
    MPI_Request request = MPI_REQUEST_NULL;
    expect(call(arguments..., &request), name);
    return handle_of(request);
  }

  void end() {
    before_finish_();
    if (pair_ != MPI_DATATYPE_NULL) MPI_Type_free(&pair_);
    for (auto* ops : {&half_ops_, &bfloat16_ops_}) {
      for (auto& op : *ops) {
        if (op != MPI_OP_NULL) MPI_Op_free(&op);
      }
    }
  }

  struct Native {
    MPI_Datatype type;
    MPI_Op op;
  };
  Native native_of(MpiType type, MpiOp op) {
    const std::array ops = {MPI_SUM, MPI_MIN, MPI_MAX};
    const std::array types = {MPI_INT8_T, MPI_UINT8_T, MPI_INT16_T, MPI_INT32_T, MPI_INT64_T, MPI_FLOAT, MPI_DOUBLE};
    const auto which = static_cast<size_t>(op), number = static_cast<size_t>(type);
    if (number < types.size()) return {types[number], ops[which]};
    // MPI knows neither half nor bfloat16, so their values are pairs of bytes with operations of Tessera's.
    if (pair_ == MPI_DATATYPE_NULL) {
      expect(MPI_Type_contiguous(2, MPI_BYTE, &pair_), "MPI_Type_contiguous");
      expect(MPI_Type_commit(&pair_), "MPI_Type_commit");
    }
    auto& made = (type == MpiType::Half ? half_ops_ : bfloat16_ops_)[which];
    if (made == MPI_OP_NULL) {
      constexpr int kCommutes = 1;
      expect(MPI_Op_create((type == MpiType::Half ? kOf<c10::Half> : kOf<c10::BFloat16>)[which], kCommutes, &made), "MPI_Op_create");
    }
    return {pair_, made};
  }
  template <class T>
  static constexpr std::array<MPI_User_function*, 3> kOf = {combine<T, MpiOp::Sum>, combine<T, MpiOp::Min>, combine<T, MpiOp::Max>};

  std::function<void()> before_finish_;
  std::map<MpiHandle, MpiHandle> next_parts_;  // of broadcasts under way
  MPI_Datatype pair_ = MPI_DATATYPE_NULL;
  std::array<MPI_Op, 3> half_ops_ = {MPI_OP_NULL, MPI_OP_NULL, MPI_OP_NULL};
  std::array<MPI_Op, 3> bfloat16_ops_ = half_ops_;
};

}  // namespace

extern "C" [[gnu::visibility("default")]] MpiCalls* tessera_mpi_calls() {
  static auto& library = *new Library;  // never destroyed, because MPI may be used until the process ends
  return &library;
}
