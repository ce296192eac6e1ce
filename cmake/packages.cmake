# Which sources and headers, as patterns below tessera/, are of which package. All others are the core, which includes none of these: they register
# there what it has to know of them. tests/check_rooms.py reads this list, too, and sees to it.
set(TESSERA_MODELS
  models.h models/* llm/*
  nn/attention* nn/layer_choice* nn/linear* nn/lora* nn/quantize* nn/rms_norm* nn/rotary* nn/row_kernels* nn/swiglu*
  data/added_tokens* data/byte_pairs* data/character_set* data/pattern* data/pre_tokenizer* data/sentence_* data/charsmap* data/tokenizer* data/uni*
  data/wordpiece*
  checkpoint/peft* train/apply_adapters*
  # tests of the core with these models
  checkpoint/base_test* checkpoint/billion_long_test* checkpoint/quantize_test* nn/second_derivatives_test* shard/deferred_init_test* shard/wrap_test*
  train/settings_matrix_test* train/trainer_ranks_test*)
set(TESSERA_VISION vision.h vision/*)
set(TESSERA_XLA xla/* xla/*/* xla/device/lowerings/*)
# The commands of `tessera`, and those of them that need another package.
set(TESSERA_CLI cli/* cli/ckpt/* cli/config/* cli/launch/* cli/report/*)
set(TESSERA_CLI_MODELS cli/models/*)
set(TESSERA_CLI_XLA cli/xla/*)
