// Saves and loads extra tensors outside the model: Contents::tensors and Contents::tensors_by_rank.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/stored/manifest.h"

namespace tessera::checkpoint {

/// Throws UsageError for names and tensors that can't be saved.
void expect_savable_beside(const Contents& contents);
/// Throws UsageError for tensors that a load can't fill.
void expect_loadable_beside(const Contents& contents);
/// Throws DisagreementError on all ranks unless they have the same tensors with the same values, and tensors_by_rank of the same names,
/// dtypes and row shapes. Collective.
void expect_same_beside(const Contents& contents, const Communicator& world);

/// Returns a tensor of tensors_by_rank with a dimension of rows: a scalar becomes one row.
at::Tensor as_rows(const at::Tensor& tensor);

/// The rows that each rank has of each tensor in tensors_by_rank: rank r has the rows from element r of the vector up to element r + 1.
using RowsOfRanks = std::map<std::string, std::vector<int64_t>>;
/// Returns the rows of all ranks. Throws DisagreementError on all ranks if they load different extra tensors. Collective.
RowsOfRanks rows_of_ranks(const Contents& contents, const Communicator& world);

/// Throws UsageError if tensors do not fit the checkpoint, and lists them.
void expect_beside(const Contents& contents, const RowsOfRanks& rows, const Manifest& manifest, const LoadOptions& options,
                   const std::string& where);
/// Fills the tensors from a checkpoint that fits.
void load_beside(Contents& contents, const RowsOfRanks& rows, const Manifest& manifest, const CatalogReader& stored,
                 const Communicator& world);

}  // namespace tessera::checkpoint
