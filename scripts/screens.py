"""Makes the pictures in docs/screens: terminals as SVG files, and a page as a PNG file.

screens.py                  all pictures
screens.py plan top report  only these
screens.py recording        a job in half a minute, which moves: a rank is killed, and later another number of ranks resumes it

Runs the programs in build/bin on a real terminal (a pty), presses keys, and draws what then stands on the screen. Needs the Python
package pyte, what ./quickstart makes and installs, and for the page chromium.
"""
import html
import itertools
import json
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import sys
import subprocess
import tempfile
import termios
import time
from dataclasses import dataclass, field

try:
    import pyte
except ImportError:
    sys.exit(f"the package that interprets what programs send to terminals is missing: {sys.executable} -m pip install pyte")

ROOT = pathlib.Path(__file__).resolve().parent.parent
COLUMNS, ROWS = 80, 40
PATIENCE = 60  # seconds without any output
ENTER, DOWN, CONTROL_C = b"\r", b"\x1b[B", b"\x03"


@dataclass
class Scene:
    name: str
    title: str  # for those who can't see the picture
    command: str
    keys: list = field(default_factory=list)  # pairs: what must stand on the screen first, and what is typed then
    until: str = ""  # what must stand on the screen for the picture; unless given, the program runs to its end
    files: dict = field(default_factory=dict)
    rows: int = ROWS
    beside: str = ""  # runs meanwhile, unseen
    begin: str = ""  # what the first row that is drawn below the command has


RECORDED = "TESSERA_RESIDENCE=gathered tessera launch -n 2 --record run mnist --use-nested-fsdp --num-epochs {} >log 2>&1"
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
         "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
         "rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu"}
SCENES = [
    Scene("wizard", "tessera config asks which modules become units; the arrow keys have moved to the second entry of a menu",
          "tessera config --config-file run.yaml",
          keys=[("> 2. multi-CPU", ENTER), (r"machines will you use\?.*:$", b"1" + ENTER), (r"DeepSpeed\?.*:$", b"no" + ENTER),
                (r"FullyShardedDataParallel\?.*:$", b"yes" + ENTER), (r"> 2\. 2", ENTER), (r"after forward\?.*:$", b"yes" + ENTER),
                (r"> 1\. TRANSFORMER", DOWN)],
          until=r"> 2\. SIZE_BASED_WRAP"),
    Scene("bar", "a training run on two ranks: what the first epoch has brought, and the progress bar of the second",
          "tessera launch -n 2 mnist --use-nested-fsdp --ckpt-prefix run/mnist",
          until=r"epoch 2/2 +6\d%.* left$"),  # with its end, because the terminal may have got half of the line
    Scene("plan", "tessera plan: the memory of a rank by kind for each strategy, as bars, best first, and the command that starts the run",
          "tessera plan Llama-3.1-8B -n 64 --machine gpu --precision bf16 --memory 80GB", files={"Llama-3.1-8B/config.json": json.dumps(LLAMA)},
          begin="[█▓▒░]", rows=80),
    Scene("top", "tessera top: ranks, step, rate, memory, who is late, and the curve of the loss", "tessera top run",
          until=r"step \d{4}", beside=RECORDED.format(8), rows=24),
    Scene("help", "the help of tessera: its commands, and examples", "tessera --help", rows=60),
]


def environment_in(folder):
    """Neither the settings nor the paths of the person who makes the pictures belong into them."""
    return {"PATH": f"{ROOT}/build/bin:/usr/bin:/bin", "HOME": folder, "TERM": "xterm-256color", "LANG": "C.UTF-8"}


class Terminal:
    """Command lines that run on a screen of their own, one after the other."""

    PROMPT = b"\x1b[32m$\x1b[0m "

    def __init__(self, rows):
        self.screen = pyte.Screen(COLUMNS, rows)
        self.stream = pyte.ByteStream(self.screen)

    def start(self, command, folder):
        self.child, self.fd = pty.fork()
        if self.child == 0:
            termios.tcsetwinsize(0, (self.screen.lines, COLUMNS))
            os.chdir(folder)
            os.execve("/bin/sh", ["sh", "-c", command], environment_in(folder))

    def text(self):
        return "\n".join(line.rstrip() for line in self.screen.display)

    def receive(self):
        """Returns False if the program has ended."""
        if not select.select([self.fd], [], [], PATIENCE)[0]:
            sys.exit(f"nothing has happened for {PATIENCE} s:\n{self.text()}")
        try:
            output = os.read(self.fd, 65536)
        except OSError:  # how Linux says that nobody has the terminal open any more
            return False
        self.stream.feed(output.replace(f"{ROOT}/build/bin/".encode(), b""))  # which PATH would have
        return bool(output)

    def run(self, until=""):
        """Until this is on the screen, or else to the end."""
        while not until or not re.search(until, self.text(), re.M):
            if self.receive():
                continue
            if until:
                sys.exit(f"the program has ended, and '{until}' was never on the screen:\n{self.text()}")
            os.waitpid(self.child, 0)
            return os.close(self.fd)


def play(scene, folder):
    for name, content in scene.files.items():
        pathlib.Path(folder, name).parent.mkdir(exist_ok=True)
        pathlib.Path(folder, name).write_text(content)
    beside = subprocess.Popen(scene.beside, shell=True, cwd=folder, env=environment_in(folder), start_new_session=True) if scene.beside else None
    while beside and not pathlib.Path(folder, "run/run.json").exists():
        time.sleep(0.1)
    terminal = Terminal(scene.rows)
    terminal.stream.feed(Terminal.PROMPT + scene.command.encode() + b"\r\n")
    terminal.start(scene.command, folder)
    for wanted, keys in scene.keys:
        terminal.run(until=wanted)
        os.write(terminal.fd, keys)
    terminal.run(scene.until)
    if not scene.until:
        terminal.stream.feed(Terminal.PROMPT)  # the shell's, which would be there again
    for private in (folder, str(ROOT), os.uname().nodename):
        if private in terminal.text():
            sys.exit(f"'{private}' is nobody else's business:\n{terminal.text()}")
    picture = draw(scene, terminal.screen)
    if scene.until:
        os.write(terminal.fd, CONTROL_C)
        terminal.run()
    if beside:
        os.killpg(beside.pid, signal.SIGTERM)
        beside.wait()
    return picture


WIDTH, HEIGHT, SIZE = 9, 20, 15  # of a cell, and of letters, which are 0.6 of that wide in most fonts
LEFT, TOP, BOTTOM = 12, 44, 14  # what the frame takes
PAPER, INK = "#1b1f27", "#d3d9e3"
COLOURS = {"black": "#6b7380", "red": "#f07178", "green": "#9ccc65", "brown": "#ffcb6b", "blue": "#82aaff", "magenta": "#d3a2f2",
           "cyan": "#70d6e3", "white": "#f4f6fa"}  # what pyte calls brown is yellow
STYLE = f'text{{font:{SIZE}px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:{INK}}}'
# Blocks become rectangles, since fonts leave gaps between them. Other text continues over one space and ends before two, as columns do.
PIECE = re.compile(r"█+|▓+|▒+|░+|[▁-▇▉-▏▕]|[^\s▁-▓▕]+(?: [^\s▁-▓▕]+)*")
SHADES = {"░": 0.25, "▒": 0.5, "▓": 0.75}


def colour(name, otherwise):
    """Of what pyte calls default, red, brightred, or by six digits."""
    return otherwise if name == "default" else COLOURS.get(name.removeprefix("bright"), f"#{name}")


def rectangle(x, y, width, fill, height=HEIGHT, opacity=1):
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"' + f' fill-opacity="{opacity}"' * (opacity < 1) + "/>"


def draw_piece(piece, x, y, ink, bold):
    if piece[0] == "▕":
        return rectangle(x + WIDTH * 7 / 8, y, WIDTH / 8, ink)
    if "▁" <= piece[0] <= "▇":
        high = HEIGHT * (ord(piece) - ord("▁") + 1) / 8
        return rectangle(x, y + HEIGHT - high, WIDTH, ink, high)
    if piece[0] in SHADES:
        return rectangle(x, y, len(piece) * WIDTH, ink, HEIGHT, SHADES[piece[0]])
    if "█" <= piece[0] <= "▏":
        return rectangle(x, y, len(piece) * WIDTH * (ord("▏") + 1 - ord(piece[0])) / 8, ink)
    style = ";".join(["font-weight:bold"] * bold + [f"fill:{ink}"] * (ink != INK))
    # The length keeps columns in place where a font is wider or narrower.
    return (f'<text x="{x}" y="{y + SIZE}" textLength="{len(piece) * WIDTH}"' + f' style="{style}"' * bool(style)
            + f">{html.escape(piece, quote=False)}</text>")


def draw_row(cells, y):
    x = LEFT
    for look, alike in itertools.groupby(cells, lambda cell: (cell.fg, cell.bg, cell.bold, cell.reverse)):
        foreground, background, bold, is_reverse = look
        ink, paper = (colour(foreground, INK), colour(background, PAPER))[:: -1 if is_reverse else 1]
        text = "".join(cell.data for cell in alike)
        if paper != PAPER:
            yield rectangle(x, y, len(text) * WIDTH, paper)
        yield from (draw_piece(piece[0], x + piece.start() * WIDTH, y, ink, bold) for piece in PIECE.finditer(text))
        x += len(text) * WIDTH


def frame(title, rows):
    """The window, which is dark on light pages too: programs choose their colours for that. What is in it comes behind these lines."""
    width, height = COLUMNS * WIDTH + 2 * LEFT, rows * HEIGHT + TOP + BOTTOM
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="9" fill="{PAPER}" stroke="#5a6372"/>',
        *(f'<circle cx="{24 + 20 * i}" cy="22" r="6" fill="{fill}"/>' for i, fill in enumerate(("#ed6a5e", "#f4bf4f", "#61c554"))),
    ]


def row_of(screen, y, at=0):
    return "".join(draw_row([screen.buffer[y][x] for x in range(COLUMNS)], at))


def draw(scene, screen):
    """The rows that are used."""
    cursor = screen.cursor
    last = max(y for y, line in enumerate(screen.display) if line.strip() or (y == cursor.y and not cursor.hidden))
    begin = next((y for y, line in enumerate(screen.display) if scene.begin and re.search(scene.begin, line)), 1)
    rows = [0, *range(begin, last + 1)]
    lines = frame(scene.title, len(rows))
    if not cursor.hidden and cursor.y in rows:
        lines.append(rectangle(LEFT + cursor.x * WIDTH, TOP + rows.index(cursor.y) * HEIGHT, WIDTH, "#7f8a9c"))
    return "\n".join([*lines, *(row_of(screen, y, TOP + at * HEIGHT) for at, y in enumerate(rows)), "</svg>", ""])


# --- the recording -----------------------------------------------------------------------------------------------------------------

TRAIN = "tessera launch -n {} --max-restarts 1 mnist --num-epochs {} --ckpt-prefix run/mnist --save-steps 500 --no-ckpt-consolidation"
RECORDED_ROWS, SPEED, FIRST, LAST = 22, 4, 2.0, 4.0  # rows; how much faster it goes; seconds that its end stands before and after it
TICK = 0.5


class Recording:
    """What each row shows, from when on."""

    def __init__(self, terminal):
        self.terminal, self.now, self.before = terminal, 0.0, time.monotonic()
        self.rows = [[] for _ in range(RECORDED_ROWS)]  # pairs: time, what is drawn

    def take(self, pause=None):
        real = time.monotonic()
        self.now += (real - self.before) / SPEED if pause is None else pause
        self.before = real
        for y, row in enumerate(self.rows):
            shown = row_of(self.terminal.screen, y)
            if not row or row[-1][1] != shown:
                row.append((self.now, shown))

    def run(self, command, folder, act=None):
        """`act` is called with the terminal until it returns True."""
        self.terminal.stream.feed(Terminal.PROMPT)
        for begin in range(0, len(command), 4):  # as somebody types it
            self.terminal.stream.feed(command[begin:begin + 4].encode())
            self.take(pause=0.06)
        self.terminal.stream.feed(b"\r\n")
        self.terminal.start(command, folder)
        drawn = 0
        while self.terminal.receive():
            if act and act(self.terminal):
                act = None
                self.take(pause=1.5)
            if time.monotonic() - drawn > TICK:
                self.take()
                drawn = time.monotonic()
        os.waitpid(self.terminal.child, 0)
        os.close(self.terminal.fd)
        self.take()

    def picture(self, title):
        end = FIRST + self.now + LAST
        lines = frame(title, RECORDED_ROWS)
        lines.append("<style>@media(prefers-reduced-motion:reduce){.past{visibility:hidden!important}.last{visibility:visible!important}}</style>")
        # The clock that begins anew when it ends.
        lines.append(f'<rect width="0" height="0"><animate id="clock" attributeName="x" from="0" to="0" begin="0s;clock.end" dur="{end:.2f}s"/></rect>')
        known = {}  # each row once, because lines move up
        for y, row in enumerate(self.rows):
            for (begin, shown), (until, _) in zip(row, [*row[1:], (None, "")]):
                if not shown or until is not None and until <= begin:
                    continue
                use = f'<use href="#r{known.setdefault(shown, len(known))}" y="{TOP + y * HEIGHT}"'
                if until is not None:
                    lines.append(f'{use} class="past" visibility="hidden"><set attributeName="visibility" to="visible" '
                                 f'begin="clock.begin+{FIRST + begin:.2f}s" dur="{until - begin:.2f}s"/></use>')
                else:  # what stands there first, last, and where nothing moves
                    lines.append(f'{use} class="last"><set attributeName="visibility" to="hidden" begin="clock.begin+{FIRST}s" '
                                 f'dur="{max(begin, 0.01):.2f}s"/></use>')
        lines.append("<defs>" + "".join(f'<g id="r{number}">{shown}</g>' for shown, number in known.items()) + "</defs>")
        return "\n".join([*lines, "</svg>", ""])


def kill_a_rank(terminal):
    """Once half of an epoch is done."""
    if not re.search(r"epoch 1/2 +[45]\d%", terminal.text()):
        return False
    # All that a terminal has started are of its session.
    rank = subprocess.run(["pgrep", "-x", "mnist", "-s", str(terminal.child)], capture_output=True, text=True, check=True).stdout.split()[-1]
    subprocess.run(["kill", "-9", rank], check=True)
    terminal.stream.feed(f"\r\x1b[K\x1b[33m# in another terminal: kill -9 {rank}\x1b[0m\r\n".encode())
    return True


def record(folder):
    recording = Recording(Terminal(RECORDED_ROWS))
    recording.run(TRAIN.format(2, 2), folder, kill_a_rank)
    recording.run(TRAIN.format(3, 3) + " --resume", folder)
    if folder in recording.terminal.text():
        sys.exit("the name of the folder is nobody else's business")
    return recording.picture("a job on two ranks: one is killed, all start again from the last checkpoint; later three ranks resume it")


# --- the page ----------------------------------------------------------------------------------------------------------------------


def photograph(folder):
    browser = shutil.which("chromium") or shutil.which("google-chrome") or sys.exit("report.png needs chromium: apt-get install chromium")
    subprocess.run(f"{RECORDED.format(1)} && tessera report run", shell=True, cwd=folder, env=environment_in(folder), check=True, stdout=subprocess.DEVNULL)
    subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000", "--force-device-scale-factor=1.5", "--window-size=500,1000",
                    f"--screenshot={folder}/page.png", f"file://{folder}/run/report.html"], check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return pathlib.Path(folder, "page.png").read_bytes()


PICTURES = {f"{scene.name}.svg": lambda folder, scene=scene: play(scene, folder).encode() for scene in SCENES}
PICTURES |= {"recording.svg": lambda folder: record(folder).encode(), "report.png": photograph}
wanted = set(sys.argv[1:])
if {"-h", "--help"} & wanted:
    sys.exit(print(__doc__.strip()))
if unknown := wanted - {pathlib.Path(name).stem for name in PICTURES}:
    sys.exit(f"there is no picture {min(unknown)}; there are {', '.join(PICTURES)}")
for name, make in PICTURES.items():
    if not wanted or pathlib.Path(name).stem in wanted:
        with tempfile.TemporaryDirectory() as folder:
            picture = make(folder)
        path = ROOT / "docs/screens" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(picture)
        print(f"wrote {path.relative_to(ROOT)}")
