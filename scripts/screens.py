"""Makes the pictures in docs/screens: what a person sees on a terminal, as SVG files.

screens.py            all pictures
screens.py wizard     only this one
screens.py recording  a job in half a minute, which moves: a rank is killed, and later another number of ranks goes on

Runs the programs in build/bin on a real terminal (a pty), presses keys, and draws what then stands on the screen. Needs the Python
package pyte, and what ./quickstart makes and installs.
"""
import html
import itertools
import os
import pathlib
import pty
import re
import select
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
COLUMNS, ROWS = 100, 40
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
    Scene("help", "the help of tessera: its commands, and examples", "tessera --help"),
    Scene("failure", "a rank fails: launch names it, stops the other one and repeats its last words",
          "tessera launch -n 2 sh -c 'echo reading part.$RANK; cat part.$RANK && sleep 60'", files={"part.0": ""}),
    Scene("explain", "tessera config explain: each value, and whether a flag, a variable, the file or the default gave it",
          "FSDP_OFFLOAD_PARAMS=true tessera config explain --config-file run.yaml --set num_processes=4",
          files={"run.yaml": "num_processes: 2\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
                             "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: BertLayer\n"
                             "  fsdp_activation_checkpointing: true\n"}, rows=70),
]


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
            # Neither the settings nor the paths of the person who makes the pictures belong into them.
            environment = {"PATH": f"{ROOT}/build/bin:/usr/bin:/bin", "HOME": folder, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
            os.execve("/bin/sh", ["sh", "-c", command], environment)

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
        self.stream.feed(output)
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
        pathlib.Path(folder, name).write_text(content)
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
    return picture


WIDTH, HEIGHT, SIZE = 9, 20, 15  # of a cell, and of letters, which are 0.6 of that wide in most fonts
LEFT, TOP, BOTTOM = 18, 44, 14  # what the frame takes
PAPER, INK = "#1b1f27", "#d3d9e3"
COLOURS = {"black": "#6b7380", "red": "#f07178", "green": "#9ccc65", "brown": "#ffcb6b", "blue": "#82aaff", "magenta": "#d3a2f2",
           "cyan": "#70d6e3", "white": "#f4f6fa"}  # what pyte calls brown is yellow
STYLE = f'text{{font:{SIZE}px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:{INK}}}'
# Blocks become rectangles, since fonts leave gaps between them. Other text goes on over one space and ends before two, as columns do.
PIECE = re.compile(r"█+|[▉-▏▕]|[^\s█-▏▕]+(?: [^\s█-▏▕]+)*")


def colour(name, otherwise):
    """Of what pyte calls default, red, brightred, or by six digits."""
    return otherwise if name == "default" else COLOURS.get(name.removeprefix("bright"), f"#{name}")


def rectangle(x, y, width, fill, height=HEIGHT):
    return f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{height}" fill="{fill}"/>'


def draw_piece(piece, x, y, ink, bold):
    if piece[0] == "▕":
        return rectangle(x + WIDTH * 7 / 8, y + 2, WIDTH / 8, ink, HEIGHT - 4)
    if "█" <= piece[0] <= "▏":
        return rectangle(x, y + 2, len(piece) * WIDTH * (ord("▏") + 1 - ord(piece[0])) / 8, ink, HEIGHT - 4)
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


def row_of(screen, y):
    return "".join(draw_row([screen.buffer[y][x] for x in range(COLUMNS)], TOP + y * HEIGHT))


def draw(scene, screen):
    """The rows that are used."""
    cursor = screen.cursor
    rows = 1 + max(y for y, line in enumerate(screen.display) if line.strip() or (y == cursor.y and not cursor.hidden))
    lines = frame(scene.title, rows)
    if not cursor.hidden:
        lines.append(rectangle(LEFT + cursor.x * WIDTH, TOP + cursor.y * HEIGHT, WIDTH, "#7f8a9c"))
    return "\n".join([*lines, *(row_of(screen, y) for y in range(rows)), "</svg>", ""])


# --- the recording -----------------------------------------------------------------------------------------------------------------

TRAIN = "tessera launch -n {} --max-restarts 1 mnist --num-epochs {} --ckpt-prefix run/mnist --save-steps 500 --no-ckpt-consolidation"
RECORDED_ROWS, SPEED, LAST = 22, 4, 4.0  # rows; how much faster it goes; seconds that its end stays
TICK = 0.25


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
        end = self.now + LAST
        lines = frame(title, RECORDED_ROWS)
        # The clock that begins anew when it ends.
        lines.append(f'<rect width="0" height="0"><animate id="clock" attributeName="x" from="0" to="0" begin="0s;clock.end" dur="{end:.2f}s"/></rect>')
        for row in self.rows:
            for i, (begin, shown) in enumerate(row):
                until = row[i + 1][0] if i + 1 < len(row) else end
                if not shown or until <= begin:
                    continue
                if i + 1 < len(row):
                    lines.append(f'<g visibility="hidden"><set attributeName="visibility" to="visible" begin="clock.begin+{begin:.2f}s" '
                                 f'dur="{until - begin:.2f}s"/>{shown}</g>')
                else:  # what stands there where nothing moves
                    lines.append(f'<g><set attributeName="visibility" to="hidden" begin="clock.begin" dur="{begin:.2f}s"/>{shown}</g>')
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
    return recording.picture("a job on two ranks: one is killed, all start again from the last checkpoint; later it goes on on three ranks")


PICTURES = {scene.name: lambda folder, scene=scene: play(scene, folder) for scene in SCENES} | {"recording": record}
if {"-h", "--help"} & set(sys.argv[1:]):
    sys.exit(print(__doc__.strip()))
if unknown := set(sys.argv[1:]) - set(PICTURES):
    sys.exit(f"there is no picture {min(unknown)}; there are {', '.join(PICTURES)}")
for name, make in PICTURES.items():
    if name in sys.argv[1:] or len(sys.argv) == 1:
        with tempfile.TemporaryDirectory() as folder:
            picture = make(folder)
        path = ROOT / "docs/screens" / f"{name}.svg"
        path.parent.mkdir(exist_ok=True)
        path.write_text(picture)
        print(f"wrote {path.relative_to(ROOT)}")
