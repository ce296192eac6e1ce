"""Reads what our reporters write with the trackers' own packages: `mlflow STORE` or `prometheus PORT`; prints JSON. Exit status 3: no package."""
import json
import os
import pathlib
import sys
import urllib.request

sys.path.append(str(pathlib.Path(__file__).parents[2] / "build/python/trackers"))
what, where = sys.argv[1:]
os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
try:
    if what == "mlflow":
        from mlflow.tracking import MlflowClient
    else:
        from prometheus_client.parser import text_string_to_metric_families
except ImportError as error:
    sys.exit(print(error) or 3)

if what == "mlflow":
    client = MlflowClient(pathlib.Path(where).absolute().as_uri())
    experiments = [experiment.name for experiment in client.search_experiments()]
    runs = []
    for run in client.search_runs(["0"]):
        metrics = {name: [[point.step, point.value] for point in client.get_metric_history(run.info.run_id, name)] for name in sorted(run.data.metrics)}
        runs.append([run.info.run_name, run.info.status, metrics])
    print(json.dumps([experiments, sorted(runs, key=str)]))
else:
    with urllib.request.urlopen(f"http://127.0.0.1:{where}/metrics", timeout=20) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    print(json.dumps({sample.name: [sample.value, sample.labels] for family in families for sample in family.samples}))
