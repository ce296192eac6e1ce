#include "tessera/comm/mpi/mpi_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/comm/backend/backend_hub.h"
#include "tessera/comm/host/bounded.h"
#include "tessera/comm/host/bytes.h"

namespace tessera {
namespace {

constexpr auto kStoreAnswers = std::chrono::seconds(2);
constexpr auto kLookForPeer = std::chrono::seconds(1);

std::string left_key(int rank) {
  return fmt::format("left/{}", rank);
}

/// A call whose tensors it keeps itself, so it may still run when the wait has failed.
class MpiCollective final : public c10d::Work {
 public:
  explicit MpiCollective(std::shared_ptr<MpiThread::Call> call) : call_(std::move(call)) {}
  bool wait(std::chrono::milliseconds limit) override {
    if (MpiThread::instance().wait(*call_, limit)) return true;
    throw std::runtime_error("it has not ended in time");
  }

 private:
  const std::shared_ptr<MpiThread::Call> call_;
};

/// A message whose memory is the caller's. Nothing cancels it: when the wait has failed, Tessera calls MPI no more and keeps the call for
/// good. The program must then end by MPI_Abort, because its own calls of MPI might still move data to or from this memory.
class MpiMessage final : public c10d::Work {
 public:
  MpiMessage(std::shared_ptr<MpiThread::Call> call, std::shared_ptr<MpiPresence> presence, int peer)
      : call_(std::move(call)), presence_(std::move(presence)), peer_(peer) {}
  bool wait(std::chrono::milliseconds limit) override {
    const auto end = Clock::now() + limit;
    for (bool left = false;;) {
      if (MpiThread::instance().wait(*call_, std::min(time_until(end), std::chrono::milliseconds(kLookForPeer)))) return true;
      if (left) give_up("it has left the world");
      if (Clock::now() >= end) give_up("it is late");
      left = presence_->has_left(peer_);  // its last message may still be on the way
    }
  }
  void abort() override { MpiThread::instance().halt("a group of this rank has ended"); }

 private:
  [[noreturn]] void give_up(const char* why) const {
    MpiThread::instance().halt(fmt::format("a message with rank {} has not ended: {}", peer_, why));
    throw std::runtime_error(why);
  }
  const std::shared_ptr<MpiThread::Call> call_;
  const std::shared_ptr<MpiPresence> presence_;
  const int peer_;
};

MpiType mpi_type(const at::Tensor& tensor) {
  constexpr std::array kTypes = {at::kChar,  at::kByte,   at::kShort, at::kInt,     at::kLong,
                                 at::kFloat, at::kDouble, at::kHalf,  at::kBFloat16};  // in the order of MpiType
  const auto* const found = std::ranges::find(kTypes, tensor.scalar_type());
  if (found == kTypes.end()) throw std::runtime_error(fmt::format("transport mpi adds no {}", c10::toString(tensor.scalar_type())));
  return static_cast<MpiType>(found - kTypes.begin());
}

MpiOp mpi_op(const c10d::ReduceOp& op) {
  return op == c10d::ReduceOp::MIN ? MpiOp::Min : op == c10d::ReduceOp::MAX ? MpiOp::Max : MpiOp::Sum;
}

size_t countable(const at::Tensor& tensor) {
  const auto count = static_cast<size_t>(tensor.numel());
  if (count <= MpiCalls::kMostValues) return count;
  throw std::runtime_error(
      fmt::format("MPI adds at most {} values at once, and these are {}; use smaller units", MpiCalls::kMostValues, count));
}

}  // namespace

MpiComm::~MpiComm() {
  MpiThread::instance().start([handle = handle_](MpiCalls& calls) {
    calls.release(handle);
    return MpiPending();
  });
}

MpiPresence::MpiPresence(const StorePtr& store, int rank) : store_(store->clone()), rank_(rank) {}

MpiPresence::~MpiPresence() {
  try {
    bounded(kStoreAnswers, [store = store_, key = left_key(rank_)] { return store->add(key, 1); });
  } catch (const std::exception&) {  // the store is gone, and with it the other ranks
  }
}

bool MpiPresence::has_left(int rank) const try {
  return bounded(kStoreAnswers, [store = store_, key = left_key(rank)] { return store->check({key}); }).value_or(false);
} catch (const std::exception&) {
  return false;
}

MpiBackend::MpiBackend(std::shared_ptr<MpiComm> communicator, int rank, int size, std::shared_ptr<MpiPresence> presence)
    : Backend(rank, size), communicator_(std::move(communicator)), presence_(std::move(presence)) {}

MpiBackend::Work MpiBackend::send(std::vector<at::Tensor>& tensors, int rank, int tag) {
  const auto& tensor = tensors.front();
  return message([=, bytes = bytes_of(tensor), on = communicator_->handle(),
                  own_tag = tag - BackendHub::kFirstTag](MpiCalls& calls) { return calls.send(bytes, rank, own_tag, on); },
                 tensor, rank);
}

MpiBackend::Work MpiBackend::recv(std::vector<at::Tensor>& tensors, int rank, int tag) {
  const auto& tensor = tensors.front();
  return message([=, bytes = bytes_of(tensor), on = communicator_->handle(),
                  own_tag = tag - BackendHub::kFirstTag](MpiCalls& calls) { return calls.receive(bytes, rank, own_tag, on); },
                 tensor, rank);
}

MpiBackend::Work MpiBackend::broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) {
  const auto& tensor = tensors.front();
  const auto root = static_cast<int>(options.rootRank);
  return collective([=, on = communicator_->handle()](MpiCalls& calls) { return calls.broadcast(bytes_of(tensor), root, on); }, {tensor});
}

MpiBackend::Work MpiBackend::allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  const auto& tensor = tensors.front();
  const auto begin = [values = tensor.data_ptr(), count = countable(tensor), type = mpi_type(tensor), op = mpi_op(options.reduceOp),
                      on = communicator_->handle()](MpiCalls& calls) { return calls.all_reduce(values, count, type, op, on); };
  return collective(begin, {tensor});
}

MpiBackend::Work MpiBackend::_allgather_base(at::Tensor& whole, at::Tensor& own, const c10d::AllgatherOptions& /*options*/) {
  const auto begin = [from = bytes_of(own), to = bytes_of(whole).data(), on = communicator_->handle()](MpiCalls& calls) {
    return calls.all_gather(from, to, on);
  };
  return collective(begin, {whole, own});
}

MpiBackend::Work MpiBackend::_reduce_scatter_base(at::Tensor& own, at::Tensor& whole, const c10d::ReduceScatterOptions& options) {
  const auto begin = [from = whole.const_data_ptr(), to = own.data_ptr(), count = countable(own), type = mpi_type(own),
                      op = mpi_op(options.reduceOp),
                      on = communicator_->handle()](MpiCalls& calls) { return calls.reduce_scatter(from, to, count, type, op, on); };
  return collective(begin, {whole, own});
}

void MpiBackend::abort() {
  MpiThread::instance().halt("a group of this rank has ended");
}

MpiBackend::Work MpiBackend::message(MpiThread::Begin begin, const at::Tensor& tensor, int peer) {
  return c10::make_intrusive<MpiMessage>(MpiThread::instance().start(std::move(begin), {tensor}), presence_, peer);
}

MpiBackend::Work MpiBackend::collective(MpiThread::Begin begin, std::vector<at::Tensor> tensors) {
  return c10::make_intrusive<MpiCollective>(MpiThread::instance().start(std::move(begin), std::move(tensors)));
}

}  // namespace tessera
