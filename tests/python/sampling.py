"""sampling.py FILE: drawn scores after drawn texts, and the probabilities that transformers' generate() makes of them. Ends with status 3 without the package."""
import random
import sys

import torch
from safetensors.torch import save_file

try:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessorList
except ImportError:
    sys.exit(3)

CASES, ROWS, VOCABULARY, LENGTH = 80, 3, 64, 10

torch.manual_seed(5)
source = random.Random(5)
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))
scores, texts = 3 * torch.randn(CASES, ROWS, VOCABULARY), torch.randint(VOCABULARY, (CASES, ROWS, LENGTH))
settings, probabilities = [], []
for case in range(CASES):
    own = dict(temperature=source.choice([0.3, 1.0, 1.7]), top_k=source.choice([0, 1, 5, 40, 100]), top_p=source.choice([0.05, 0.5, 0.95, 1.0]),
               min_p=source.choice([0.0, 0.02, 0.4]), repetition_penalty=source.choice([0.8, 1.0, 1.5]))
    settings.append(torch.tensor(list(own.values()), dtype=torch.float64))
    processors = model._get_logits_processor(GenerationConfig(do_sample=True, **own), input_ids_seq_length=LENGTH, encoder_input_ids=texts[case],
                                             prefix_allowed_tokens_fn=None, logits_processor=LogitsProcessorList(), device="cpu")
    probabilities.append(processors(texts[case], scores[case]).softmax(-1))
save_file({"scores": scores, "texts": texts, "settings": torch.stack(settings), "probabilities": torch.stack(probabilities)}, sys.argv[1])
