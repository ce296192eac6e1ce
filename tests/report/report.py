"""Records two trainings of four ranks, one of them with faults, and looks at what `tessera top`, `tessera report`, a browser and Perfetto make of them:
report.py TESSERA PROGRAM [BROWSER]"""
import collections
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

from browser import Browser

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from running import BOUND, ENVIRONMENT  # noqa: E402

TESSERA, PROGRAM, *BROWSER = sys.argv[1:]
HOSTILE = "</script><img src=x onerror=throw(1)>\"'"

# Texts whose colour is too near to that of what is behind them.
PALE = """
(() => {
  const numbers = text => text.match(/[\\d.]+/g).map(Number)
  const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0)
  const behind = node => { for (; node; node = node.parentElement) { const c = numbers(getComputedStyle(node).backgroundColor); if (c.length < 4 || c[3] > 0) return c } return [255, 255, 255] }
  const found = []
  for (const node of document.querySelectorAll('h1,h2,h3,p,small,b,pre,summary,th,td,span,svg text:not(.on):not(.in)')) {
    if (!node.textContent.trim() || !node.getClientRects().length) continue
    const style = getComputedStyle(node), a = light(numbers(node.namespaceURI.endsWith('svg') ? style.fill : style.color)), b = light(behind(node))
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)
    if (contrast < 4.5) found.push(node.textContent.slice(0, 40) + ' ' + contrast.toFixed(2))
  }
  return found
})()"""


def output_of(*command):
    done = subprocess.run([*BOUND, *map(str, command)], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{command} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def with_another_name(run, folder):
    """A copy of the run, in which unit 0 has a name that no page may believe."""
    folder.mkdir()
    for file in run.glob("*.json*"):
        (folder / file.name).write_text(file.read_text().replace('"0"', json.dumps(HOSTILE)))
    return folder


class Report(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.sick, cls.healthy = (cls.folder / name for name in ("sick", "healthy"))
        for run in (cls.sick, cls.healthy):
            output_of(TESSERA, "launch", "-n", 4, "--record", run, PROGRAM, run.name)
        output_of(TESSERA, "report", cls.sick)
        cls.events = json.loads((cls.sick / "trace.json").read_text())["traceEvents"]

    def advice(self, run):
        return json.loads(output_of(TESSERA, "report", run, "--json"))["runs"][0]["advice"]

    def test_advice(self):
        advice = self.advice(self.sick)
        self.assertEqual({rank for each in advice for rank in each["ranks"]}, {2}, advice)
        self.assertEqual([each["units"] for each in advice if each["name"] == "unit-too-large"], [["0"]], advice)
        for each in self.advice(self.healthy):
            self.assertEqual(each["units"] + each["ranks"], [], each)

    def test_top(self):
        rows = [line[1:].split() for line in output_of(TESSERA, "top", self.sick).splitlines()]
        table = rows[next(i for i, row in enumerate(rows) if row[:2] == ["rank", "step"]) + 1:]
        self.assertEqual(sorted(row[0] for row in table if row), ["0", "1", "2", "3"])

    def test_trace(self):
        """The rules of the Trace Event Format for the kinds of events that are there, and the spans of each unit on each rank."""
        tracks, operations, kinds = {}, {}, collections.defaultdict(set)
        for event in self.events:
            self.assertIn(event["ph"], "XCM")
            self.assertIsInstance(event["pid"], int)
            self.assertIsInstance(event["name"], str)
            if event["ph"] == "M":
                self.assertIn(event["name"], ("process_name", "thread_name"))
                self.assertIsInstance(event["args"]["name"], str)
                continue
            self.assertIsInstance(event["ts"], (int, float))
            if event["ph"] == "C":
                self.assertTrue(all(isinstance(value, (int, float)) for value in event["args"].values()))
                continue
            self.assertGreaterEqual(event["dur"], 0)
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["dur"]))
            unit = event["name"] if event["cat"] == "unit" else event["args"].get("unit")
            kinds[event["pid"], unit].add(event["args"].get("operation") or event["cat"])
            kinds[event["pid"], "any"].add(event["cat"])
            if event["cat"] == "collective" and event["args"].get("unit"):
                operation = tuple(str(event["args"].get(key)) for key in ("group", "operation", "sequence"))
                operations.setdefault(operation, []).append((event["ts"], event["ts"] + event["dur"]))
        self.assertEqual(sorted({rank for rank, _ in tracks}), [0, 1, 2, 3])
        for rank in range(4):
            for unit in ("0", "1", "2"):
                self.assertLessEqual({"unshard", "unit", "all_gather", "reduce_scatter"}, kinds[rank, unit], (rank, unit))
            self.assertLessEqual({"reduce", "optimizer"}, kinds[rank, "any"])
        for track in tracks.values():  # events of a track lie one in the other, or one after the other
            open_until = []
            for begin, minus in sorted(track):
                while open_until and open_until[-1] <= begin + 1e-2:
                    open_until.pop()
                self.assertTrue(not open_until or begin - minus <= open_until[-1] + 1e-2)
                open_until.append(begin - minus)
        whole = [calls for calls in operations.values() if len(calls) == 4]
        self.assertGreater(len(whole), 100)
        for calls in whole:  # none ends before all have begun, by clocks that each process has read for itself
            self.assertLessEqual(max(begin for begin, _ in calls), min(end for _, end in calls) + 100)

    def test_perfetto(self):
        try:
            from perfetto.trace_processor import TraceProcessor

            processor = TraceProcessor(trace=str(self.sick / "trace.json"))
        except Exception as error:  # it downloads its program when it is first used
            self.skipTest(f"Perfetto's trace processor can't be had: {error!r}")
        with processor:
            query = "select p.pid as rank, count(*) as n from slice s join thread_track t on s.track_id = t.id join thread using (utid) join process p using (upid) where s.category = 'unit' group by rank order by rank"
            units = {row.rank: row.n for row in processor.query(query)}
            self.assertEqual(units, {rank: sum(event["ph"] == "X" and event["cat"] == "unit" and event["pid"] == rank for event in self.events) for rank in range(4)})
            self.assertEqual(next(iter(processor.query("select count(*) as n from stats where severity = 'error' and value > 0"))).n, 0)

    @unittest.skipUnless(BROWSER, "there is no browser")
    def test_page(self):
        sick, empty = with_another_name(self.sick, self.folder / "hostile"), self.folder / "empty"
        empty.mkdir()
        (empty / "run.json").write_text(json.dumps({"format": 1, "world": 2, "status": "runs", "started": 1764500000.0}))
        for run in (sick, self.healthy, empty):
            output_of(TESSERA, "report", run)
        output_of(TESSERA, "report", self.healthy, sick)
        pages = {sick / "report.html": 5, self.healthy / "report.html": 5, empty / "report.html": 0, self.healthy / "comparison.html": 9}
        with Browser(BROWSER[0]) as browser:
            for page, drawings in pages.items():
                for width, theme in ((360, "dark"), (1280, "light")) if page.parent != sick else ((360, "light"), (360, "dark"), (1280, "light"), (1280, "dark")):
                    with self.subTest(page=page.name, of=page.parent.name, width=width, theme=theme):
                        self.assertEqual(browser.show(page.as_uri(), width, theme), [])
                        self.assertLessEqual(browser.value("document.documentElement.scrollWidth"), width)
                        self.assertGreaterEqual(browser.value("document.querySelectorAll('svg').length"), drawings)
                        self.assertEqual(browser.value("[...document.querySelectorAll('svg')].filter(s => s.querySelectorAll('rect, path').length < 2 || s.getBoundingClientRect().height < 10).length"), 0)
                        self.assertEqual(browser.value(PALE), [])
                        self.assertEqual(browser.value("document.querySelectorAll('img').length"), 0)
            self.assertEqual(browser.show((self.healthy / "report.html").as_uri(), 1280, "light"), [])
            labels = browser.value("[...document.querySelectorAll('svg[aria-label^=\"By kind\"] text')].map(t => t.textContent)")
            self.assertGreater(len(labels), 4)
            self.assertEqual(len(set(labels)), len(labels), labels)
            self.assertEqual(browser.show((sick / "report.html").as_uri(), 360, "light"), [])
            self.assertIn("Slow: rank 2 on ", browser.value("document.body.innerText"))
            self.assertIn(HOSTILE, browser.value("document.body.textContent"))
            tip = "(() => { const r = [...document.querySelectorAll('[data-t]')].find(n => n.dataset.t); r.dispatchEvent(new PointerEvent('pointerdown', {bubbles: true})); return document.getElementById('tip').innerText })()"
            self.assertIn("rank", browser.value(tip))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
