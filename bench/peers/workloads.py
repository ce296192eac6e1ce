"""The benchmarks' models in PyTorch: the same layers, sizes and batches as in bench/train.cpp."""
import os

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads, causal=True, eps=1e-5):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.attention = Attention(width, heads, causal)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    vocabulary = 8192

    def __init__(self, width=0, layers=0, heads=8, length=256):
        super().__init__()
        width, layers, self.longest = width or 512, layers or 8, length
        self.tokens, self.positions = nn.Embedding(self.vocabulary, width), nn.Embedding(self.longest, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, self.vocabulary, bias=False)
        self.units = nn.ModuleList(Block(width, heads) for _ in range(layers))

    @torch.no_grad()
    def set_start_values(self):
        """Draws the start values of bench/train.cpp on the device of the parameters."""
        torch.manual_seed(0)
        for name, value in self.named_parameters():
            if value.dim() > 1:
                value.normal_(0, 0.02)
            else:
                value.fill_(0 if name.endswith("bias") else 1)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for unit in self.units:
            x = unit(x)
        return self.head(self.norm(x))

    def batch(self, count, generator):
        ids = torch.randint(0, self.vocabulary, (count, self.longest + 1), generator=generator)
        return ids[:, :-1], ids[:, 1:]


class Mlp(nn.Module):
    def __init__(self, width=0, layers=0):
        super().__init__()
        self.width = width or 2048
        self.units = nn.ModuleList(nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(layers or 8))
        self.head = nn.Linear(self.width, 16)

    def forward(self, x):
        for unit in self.units:
            x = unit(x)
        return self.head(x)

    def batch(self, count, generator):
        return torch.randn(count, self.width, generator=generator), torch.randint(0, 16, (count,), generator=generator)


class Cnn(nn.Module):
    def __init__(self, width=0, layers=0):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 10, 5), nn.BatchNorm2d(10)
        self.conv2, self.bn2 = nn.Conv2d(10, 20, 5), nn.BatchNorm2d(20)
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    @property
    def units(self):
        return [self.conv1, self.conv2, self.fc1]

    def forward(self, x):
        x = self.bn1(F.relu(F.max_pool2d(self.conv1(x), 2)))
        x = self.bn2(F.relu(F.max_pool2d(self.conv2(x), 2)))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), 1)

    def batch(self, count, generator):
        return torch.randn(count, 1, 28, 28, generator=generator), torch.randint(0, 10, (count,), generator=generator)


class Bottleneck(nn.Module):
    def __init__(self, inside, width, stride):
        super().__init__()
        def convolution(a, b, size, step=1):
            return nn.Conv2d(a, b, size, step, size // 2, bias=False)
        self.conv1, self.bn1 = convolution(inside, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = convolution(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        same = stride == 1 and inside == 4 * width
        self.shortcut = nn.Identity() if same else nn.Sequential(convolution(inside, 4 * width, 1, stride), nn.BatchNorm2d(4 * width))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(F.relu(self.bn2(self.conv2(y)))))
        return F.relu(y + self.shortcut(x))


class ResNet50(nn.Module):
    def __init__(self, width=0, layers=0):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        blocks, inside, width = [], 64, 64
        for count in (3, 4, 6, 3):
            for i in range(count):
                blocks.append(Bottleneck(inside, width, 2 if i == 0 and width > 64 else 1))
                inside = 4 * width
            width *= 2
        self.units = nn.ModuleList(blocks)
        self.fc = nn.Linear(inside, 1000)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for unit in self.units:
            x = unit(x)
        return self.fc(x.mean((2, 3)))

    def batch(self, count, generator):
        return torch.randn(count, 3, 224, 224, generator=generator), torch.randint(0, 1000, (count,), generator=generator)


class Vit(nn.Module):
    def __init__(self, width=0, layers=0):
        super().__init__()
        width = width or 384
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(0.02 * torch.randn(1, 1 + 14 * 14, width))
        self.units = nn.ModuleList(Block(width, width // 64, causal=False, eps=1e-6) for _ in range(layers or 12))
        self.norm, self.head = nn.LayerNorm(width, 1e-6), nn.Linear(width, 1000)

    def forward(self, x):
        words = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(words), -1, -1), words], 1) + self.positions
        for unit in self.units:
            x = unit(x)
        return self.head(self.norm(x)[:, 0])

    def batch(self, count, generator):
        return torch.randn(count, 3, 224, 224, generator=generator), torch.randint(0, 1000, (count,), generator=generator)


class Llama(nn.Module):
    """The unmodified Llama of transformers."""

    def __init__(self, width=0, layers=0, length=256):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        width, self.length = width or 576, length
        self.model = LlamaForCausalLM(LlamaConfig(
            vocab_size=49152, hidden_size=width, intermediate_size=width // 3 * 8, num_hidden_layers=layers or 30, num_attention_heads=width // 64,
            num_key_value_heads=width // 192, max_position_embeddings=2048, tie_word_embeddings=True, rope_theta=100000.0))

    @property
    def units(self):
        return self.model.model.layers

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits

    def batch(self, count, generator):
        ids = torch.randint(0, self.model.config.vocab_size, (count, self.length + 1), generator=generator)
        return ids[:, :-1], ids[:, 1:]


class Mixtral(Llama):
    """The Mixtral of transformers; a layer with its experts is a unit. Each rank runs all experts, some of them without tokens: FSDP2 over gloo aborts where
    ranks use different ones."""

    def __init__(self, width=0, layers=0, length=256):
        nn.Module.__init__(self)
        import inspect
        import textwrap

        from transformers import MixtralConfig, MixtralForCausalLM
        from transformers.models.mixtral import modeling_mixtral

        block = modeling_mixtral.MixtralSparseMoeBlock
        used = "torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()"
        source = textwrap.dedent(inspect.getsource(block.forward))
        assert used in source, "another version of transformers"
        made = {}
        exec(source.replace(used, "range(self.num_experts)"), vars(modeling_mixtral), made)
        block.forward = made["forward"]
        width, self.length = width or 512, length
        self.model = MixtralForCausalLM(MixtralConfig(
            vocab_size=32000, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers or 8, num_attention_heads=width // 64,
            num_key_value_heads=width // 256, max_position_embeddings=2048, tie_word_embeddings=True, num_local_experts=8, num_experts_per_tok=2))


MODELS = {"gpt": Gpt, "llama": Llama, "mixtral": Mixtral, "mlp": Mlp, "cnn": Cnn, "resnet50": ResNet50, "vit": Vit}
BATCH = {"gpt": 4, "llama": 2, "mixtral": 2, "mlp": 32, "cnn": 128, "resnet50": 8, "vit": 4}


def loss_of(scores, targets):
    return F.cross_entropy(scores.float().reshape(-1, scores.shape[-1]), targets.reshape(-1))


def rank_and_world():
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
