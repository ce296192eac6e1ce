// Tensors that a program keeps in a checkpoint beside its model: Contents::tensors and Contents::tensors_by_rank.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/stored/manifest.h"

namespace tessera::checkpoint {

/// Throws UsageError for names and tensors that can't be saved.
void expect_savable_beside(const Contents& contents);
/// Throws UsageError for tensors that can't be filled.
void expect_loadable_beside(const Contents& contents);
/// Throws DisagreementError on all ranks unless they have the same tensors with the same values, and tensors by rank of the same names,
/// dtypes and row shapes. Collective.
void expect_same_beside(const Contents& contents, const Communicator& world);

/// A tensor by rank as rows: a number is one.
at::Tensor as_rows(const at::Tensor& tensor);

/// For each tensor by rank, where each rank's rows begin here: rank r has those from the number at r to the number at r + 1.
using RowsOfRanks = std::map<std::string, std::vector<int64_t>>;
/// Throws DisagreementError on all ranks if they ask for different tensors. Collective.
RowsOfRanks rows_of_ranks(const Contents& contents, const Communicator& world);

/// Throws UsageError, which lists all that does not fit the checkpoint.
void expect_beside(const Contents& contents, const RowsOfRanks& rows, const Manifest& manifest, const LoadOptions& options,
                   const std::string& where);
/// Fills the tensors from a checkpoint that fits.
void load_beside(Contents& contents, const RowsOfRanks& rows, const Manifest& manifest, const CatalogReader& stored,
                 const Communicator& world);

}  // namespace tessera::checkpoint
