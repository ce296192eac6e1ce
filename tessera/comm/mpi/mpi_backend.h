// MpiBackend: a backend of c10d whose messages and collectives are those of an MPI communicator.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "tessera/comm/host/rendezvous.h"
#include "tessera/comm/mpi/mpi_thread.h"

namespace tessera {

/// A communicator that only Tessera uses. The last owner releases it.
class MpiComm {
 public:
  explicit MpiComm(MpiHandle handle) : handle_(handle) {}
  MpiComm(const MpiComm&) = delete;
  MpiComm& operator=(const MpiComm&) = delete;
  ~MpiComm();
  MpiHandle handle() const { return handle_; }

 private:
  const MpiHandle handle_;
};

/// Tells the other ranks when this rank leaves the world, because MPI does not tell them.
class MpiPresence {
 public:
  MpiPresence(const StorePtr& store, int rank);
  MpiPresence(const MpiPresence&) = delete;
  MpiPresence& operator=(const MpiPresence&) = delete;
  ~MpiPresence();
  bool has_left(int rank) const;

 private:
  const StorePtr store_;
  const int rank_;
};

class MpiBackend final : public c10d::Backend {
 public:
  /// Messages need `presence`; collectives do not.
  MpiBackend(std::shared_ptr<MpiComm> communicator, int rank, int size, std::shared_ptr<MpiPresence> presence = nullptr);

  const std::string getBackendName() const override { return "mpi"; }
  using Work = c10::intrusive_ptr<c10d::Work>;
  Work send(std::vector<at::Tensor>& tensors, int rank, int tag) override;
  Work recv(std::vector<at::Tensor>& tensors, int rank, int tag) override;
  Work broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override;
  Work allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override;
  Work _allgather_base(at::Tensor& whole, at::Tensor& own, const c10d::AllgatherOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& own, at::Tensor& whole, const c10d::ReduceScatterOptions& options) override;
  void abort() override;

 private:
  Work message(MpiThread::Begin begin, const at::Tensor& tensor, int peer);
  Work collective(MpiThread::Begin begin, std::vector<at::Tensor> tensors);

  const std::shared_ptr<MpiComm> communicator_;
  const std::shared_ptr<MpiPresence> presence_;
};

}  // namespace tessera
