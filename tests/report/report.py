"""Looks at the pages of `tessera report` in a headless browser, and at its merged traces: report.py TESSERA Page BROWSER, report.py TESSERA Trace"""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

from browser import Browser
from recorded import make_run

TESSERA = sys.argv[1]

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


class Report(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def report(self, *arguments):
        done = subprocess.run([TESSERA, "report", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout


class Page(Report):
    def test_page(self):
        hostile = "</script><img src=x onerror=throw(1)>\"'"
        sick = make_run(self.folder / "sick", slow={3: 1.5}, large="layers.1", hosts=["alpha", "alpha", "beta", "beta"], ahead={"beta": 3.7}, units=("embed", "layers.0", "layers.1", hostile))
        healthy = make_run(self.folder / "healthy", world=1)
        empty = self.folder / "empty"
        empty.mkdir()
        (empty / "run.json").write_text(json.dumps({"format": 1, "world": 2, "status": "runs", "started": 1764500000.0}))
        for run in (sick, healthy, empty):
            self.report(run)
        self.report(healthy, sick)
        pages = {sick / "report.html": 7, healthy / "report.html": 6, empty / "report.html": 0, healthy / "comparison.html": 10}
        with Browser(sys.argv[3]) as browser:
            for page, drawings in pages.items():
                for width, theme in ((360, "dark"), (1280, "light")) if page.parent.name != "sick" else ((360, "light"), (360, "dark"), (1280, "light"), (1280, "dark")):
                    with self.subTest(page=page.name, of=page.parent.name, width=width, theme=theme):
                        self.assertEqual(browser.show(page.as_uri(), width, theme), [])
                        self.assertLessEqual(browser.value("document.documentElement.scrollWidth"), width)
                        self.assertGreaterEqual(browser.value("document.querySelectorAll('svg').length"), drawings)
                        self.assertEqual(browser.value("[...document.querySelectorAll('svg')].filter(s => s.querySelectorAll('rect, path').length < 2 || s.getBoundingClientRect().height < 10).length"), 0)
                        self.assertEqual(browser.value(PALE), [])
                        self.assertEqual(browser.value("document.querySelectorAll('img').length"), 0)
            self.assertEqual(browser.show((sick / "report.html").as_uri(), 360, "light"), [])
            self.assertIn("Slow: rank 3 on beta", browser.value("document.body.innerText"))
            self.assertIn(hostile, browser.value("document.body.textContent"))
            tip = "(() => { const r = [...document.querySelectorAll('[data-t]')].find(n => n.dataset.t); r.dispatchEvent(new PointerEvent('pointerdown', {bubbles: true})); return document.getElementById('tip').innerText })()"
            self.assertIn("rank", browser.value(tip))


class Trace(Report):
    def setUp(self):
        super().setUp()
        run = make_run(self.folder / "run", slow={3: 1.5}, hosts=["alpha", "alpha", "beta", "beta"], ahead={"beta": 3.7})
        self.report(run)
        self.trace = run / "trace.json"
        self.events = json.loads(self.trace.read_text())["traceEvents"]

    def test_format(self):
        """The rules of the Trace Event Format for the kinds of events that are there."""
        tracks, operations = {}, {}
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
            if event["cat"] == "collective":
                operations.setdefault(event["args"]["sequence"], []).append((event["ts"], event["ts"] + event["dur"]))
        self.assertEqual(sorted(tracks), [(rank, tid) for rank in range(4) for tid in (0, 1)])
        for track in tracks.values():  # events of a track lie one in the other, or one after the other
            open_until = []
            for begin, minus in sorted(track):
                while open_until and open_until[-1] <= begin + 1e-2:
                    open_until.pop()
                self.assertTrue(not open_until or begin - minus <= open_until[-1] + 1e-2)
                open_until.append(begin - minus)
        for calls in operations.values():  # the clocks fit, to the microsecond
            self.assertEqual(len(calls), 4)
            self.assertLessEqual(max(begin for begin, _ in calls), min(end for _, end in calls) + 1)

    def test_perfetto(self):
        try:
            from perfetto.trace_processor import TraceProcessor

            processor = TraceProcessor(trace=str(self.trace))
        except Exception as error:  # it downloads its program when it is first used
            self.skipTest(f"Perfetto's trace processor can't be had: {error!r}")
        with processor:
            query = "select p.pid as rank, sum(s.dur) / 1e9 as seconds from slice s join thread_track t on s.track_id = t.id join thread using (utid) join process p using (upid) where s.category = 'unit' group by rank order by rank"
            computing = {row.rank: row.seconds for row in processor.query(query)}
            self.assertEqual(sorted(computing), [0, 1, 2, 3])
            self.assertAlmostEqual(computing[3] / computing[0], 1.5, delta=0.01)
            self.assertEqual(next(iter(processor.query("select count(*) as n from stats where severity = 'error' and value > 0"))).n, 0)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], sys.argv[2]], verbosity=2)
