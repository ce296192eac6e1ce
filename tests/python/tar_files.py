"""tar_files.py FOLDER: writes the same files into archives of all forms that Python's tarfile knows, FOLDER/FORM.tar, and prints a line
FORM OFFSET SIZE NAME for each file, as it reads them again."""
import io
import sys
import tarfile

NAMES = ["a.jpg", "./b.cls", "folder/c.jpg", "ünïcode/日本.png", "x" * 100, "y" * 101, "p/" * 60 + "z.jpg", "q" * 90 + "/" + "r" * 99, "s" * 300 + ".jpg", "t/" * 400 + "u.png"]
FORMS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}

for form, number in FORMS.items():
    path = f"{sys.argv[1]}/{form}.tar"
    headers = {"comment": "of all files"} if form == "pax" else None
    with tarfile.open(path, "w", format=number, pax_headers=headers) as archive:
        for i, name in enumerate(NAMES):
            member = tarfile.TarInfo(name)
            member.size = i * 301
            member.mtime = 1e9 + 0.5 if form == "pax" else 10**9
            member.uname = "n" * 40 if form == "pax" else "somebody"
            try:
                archive.addfile(member, io.BytesIO(bytes([i]) * member.size))
            except ValueError:  # too long for ustar
                continue
            folder = tarfile.TarInfo(f"folder{i}")
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile():
                print(form, member.offset_data, member.size, member.name, sep="\t")
