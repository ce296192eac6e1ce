"""Makes the likely mistakes of a newcomer: mistakes.py BUILD. What is said last must name the way out."""
import pathlib
import subprocess
import sys
import tempfile

# What is typed, and words of the last line.
MISTAKES = [
    # commands and programs
    ("tessera lunch -n 2 mnist", "did you mean launch?"),
    ("tessera help lunch", "did you mean launch?"),
    ("tessera launch -n 2", "tessera launch --nproc-per-node N PROGRAM ARGS..."),
    ("tessera launch -n two mnist", "write a number"),
    ("tessera launch -n 0 mnist", "so 1 to "),
    ("tessera launch --nproc 2 mnist", "did you mean --nproc-per-node?"),
    ("tessera launch -n 2 mnis", "write the path of the program"),
    ("tessera launch -n 2 ./mnist", "is it built, and is the path right?"),
    ("tessera launch -n 2 train.py", "write python3 train.py"),
    ("tessera launch -n 2 job", "write ./job"),
    ("tessera launch -n 2 ./job", "chmod +x ./job"),
    ("tessera launch -n 2 folder", "name the program in it"),
    ("tessera launch -n 2 'mnist --fake-data'", "leave out the quotes"),
    ("tessera launch -n 2 mnist --fake-dat", "did you mean --fake-data?"),
    ("RANK=0 mnist --fake-data", "set both, or neither"),
    ("mnist -n 2 --fake-data", "tessera launch -n 2 mnist"),
    ("mnist --nproc_per_node=2", "tessera launch --nproc-per-node VALUE mnist"),
    ("mnist --fake-data --mixed-precision bf16", "tessera launch --mixed-precision VALUE mnist"),
    # flags and files of a recipe
    ("tessera launch -n 2 mnist --num-epochs ten", "a whole number from 0"),
    ("tessera launch -n 2 mnist --compute-dtype bf16", "bfloat16"),
    ("tessera launch -n 2 mnist --datadir nowhere", "looked for train-images"),
    ("tessera launch -n 2 --config-file run.yml mnist", "did you mean run.yaml?"),
    ("tessera launch -n 2 mnist --resume", "--ckpt-prefix"),
    ("tessera launch -n 2 mnist --fake-data --ckpt-prefix job/net", "choose another place"),
    ("tessera launch -n 2 mnist --metrics steps.txt", "FILE.jsonl"),
    ("llama --data texts.tokens", "give either --model PATH"),
    ("llama --model nope --data texts.tokens", "give the folder that it was downloaded to"),
    ("llama --config folder --data texts.tokens", "folder is empty"),
    ("tessera data tokenize chats.jsonl --tokenizer nope --out texts.tokens", "give the folder"),
    ("tessera data tokenize chats.jsonl --tokenizer job --out texts.tokens", "give one, or a folder"),
    ("tessera data tokenize chats.jsonl --tokenizer folder --out texts.tokens", "folder is empty"),
    ("tessera ckpt inspect chat.jsonl", "none called chat.jsonl-step-N"),
    # checkpoints and configurations
    ("tessera ckpt inspect nope", "none called nope-step-N"),
    ("tessera ckpt consolidate --ckpt-prefix nope", "none called nope-step-N"),
    ("tessera ckpt convert chats.jsonl out --to pytorch", "write one of accelerate"),
    ("tessera config explain --config-file nope.yaml", "tessera config makes one"),
    ("tessera config explain --set num_process=2", "did you mean num_processes?"),
    ("tessera config explain --config-file tab.yaml", "a tab indents line 2"),
    ("tessera config default --set fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP --set fsdp_transformer_layer_cls_to_wrap=2", "such as BertLayer,T5Block"),
]


def main(build):
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name, text in {"train.py": "print(1)\n", "job": "#!/bin/sh\n", "run.yaml": "num_processes: 2\n", "tab.yaml": "fsdp_config:\n\tfsdp_version: 2\n",
                           "chats.jsonl": '{"text": "a"}\n'}.items():
            (folder / name).write_text(text)
        (folder / "folder").mkdir()
        environment = {"PATH": f"{build / 'bin'}:/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        for typed, words in MISTAKES:
            ended = subprocess.run(["bash", "-c", typed], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            last = ended.stdout.rstrip().rsplit("\n", 1)[-1]
            if ended.returncode == 0 or words not in last:
                wrong.append(f"{typed}\n  status {ended.returncode}: {last}\n  says nothing of '{words}'")
    print("\n".join(wrong) or f"{len(MISTAKES)} mistakes end in what to do")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]).resolve()))
