"""image_folder.py FOLDER: prints a line LABEL CLASS PATH for each picture that torchvision.datasets.ImageFolder finds there, in its order, with paths from
FOLDER on. Ends with status 3 without the package."""
import sys

try:
    import torchvision_python  # noqa: F401
    from torchvision.datasets import ImageFolder
except ImportError:
    sys.exit(3)

folder = ImageFolder(sys.argv[1])
for path, label in folder.samples:
    print(label, folder.classes[label], path.removeprefix(sys.argv[1] + "/"), sep="\t")
