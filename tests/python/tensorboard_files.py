"""Reads a folder of event files as TensorBoard does, and prints its scalars as JSON: {"loss": [[step, value], ...]}."""
import json
import sys

from tensorboard.backend.event_processing import event_accumulator

events = event_accumulator.EventAccumulator(sys.argv[1], size_guidance={event_accumulator.SCALARS: 0})
events.Reload()
print(json.dumps({tag: [[event.step, event.value] for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}))
