// Names in `.metadata` of torch.distributed.checkpoint: names of classes, and of what Tessera adds.
#pragma once

namespace tessera::checkpoint::dcp {

constexpr auto kFile = ".metadata";
constexpr auto kVersion = "1.0.0";

/// An attribute that Tessera adds to Metadata, and that Python keeps when it reads the object: a dict of kChecksums and kSave.
constexpr auto kNote = "tessera";
/// The checksum of `.metadata` itself, computed with zeros in place of all checksums, and then that of each archive in the order of
/// storage_data.
constexpr auto kChecksums = "xxh3_64";
constexpr auto kSave = "save";

constexpr auto kMetadata = "torch.distributed.checkpoint.metadata.Metadata";
constexpr auto kTensor = "torch.distributed.checkpoint.metadata.TensorStorageMetadata";
constexpr auto kBytes = "torch.distributed.checkpoint.metadata.BytesStorageMetadata";
constexpr auto kChunk = "torch.distributed.checkpoint.metadata.ChunkStorageMetadata";
constexpr auto kProperties = "torch.distributed.checkpoint.metadata.TensorProperties";
constexpr auto kMemoryFormat = "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING";
constexpr auto kIndex = "torch.distributed.checkpoint.metadata.MetadataIndex";
constexpr auto kStorageMeta = "torch.distributed.checkpoint.metadata.StorageMeta";
constexpr auto kStorageInfo = "torch.distributed.checkpoint.filesystem._StorageInfo";
constexpr auto kOldProperties = "torch.distributed._shard.sharded_tensor.metadata.TensorProperties";  // before PyTorch 2.3
constexpr auto kOldMemoryFormat = "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING";
constexpr auto kSize = "torch.Size";
constexpr auto kLayout = "torch.serialization._get_layout";

}  // namespace tessera::checkpoint::dcp
