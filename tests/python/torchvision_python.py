"""Import it before torchvision: then torchvision's Python can be imported beside a torch for which its compiled operators were not built, such as one
for CPUs only. Models and transforms work without these operators. Raises ImportError where there is no torchvision. The set-up puts torchvision and timm
in a folder of their own, because transformers imports torchvision wherever it is found."""
import importlib.util
import pathlib
import re
import sys

import torch

sys.path.append(str(pathlib.Path(sys.prefix) / "vision"))
_spec = importlib.util.find_spec("torchvision")
if _spec is None:
    raise ImportError("there is no torchvision here")
_folder = pathlib.Path(_spec.origin).parent


def _operators_load():
    try:
        for path in _folder.glob("_C*.so"):
            torch.ops.load_library(str(path))
            return True
    except OSError:
        pass
    return False


if not _operators_load():
    # What it computes without running them is registered on import, which needs their names only.
    _text = (_folder / "_meta_registrations.py").read_text()
    _library = torch.library.Library("torchvision", "DEF")
    for _name in sorted(set(re.findall(r'register_(?:fake|meta)\("(?:torchvision::)?(\w+)"', _text))):
        _library.define(f"{_name}(Tensor a) -> Tensor")
