"""TensorBoard: an event file per run, written with TensorBoard's own package."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepscope.render.markdown.text import grid, prose
from stepscope.trackers.tracker import Point, Run, Tracker

FOLDER = "tensorboard"
MAX_NAME = 200  # bytes: a file system takes 255


def open_run(where: str | None, run: Run) -> TensorBoard:
    """Return a run in a folder of event files, by default `tensorboard/`."""
    names = [run.group, run.name] if run.group else [run.name]
    return TensorBoard(_new(Path(where or FOLDER).joinpath(*map(_file_name, names))), run)


def _file_name(name: str) -> str:
    """Return a name for a folder.

    >>> _file_name("../my run"), _file_name("..")
    ('__my_run', '_')
    """
    return re.sub(r"^\.+|[^\w.=,-]+", "_", name).encode()[:MAX_NAME].decode(errors="ignore")


def _new(folder: Path) -> Path:
    """Make the folder, or the first of `folder-2`, … that is new: a folder of TensorBoard is one run."""
    number, found = 1, folder
    while True:
        try:
            found.mkdir(parents=True)
            return found
        except FileExistsError:
            number += 1
            found = folder.with_name(f"{folder.name}-{number}")


class TensorBoard(Tracker):
    """One folder below the log directory. Artifacts lie beside the event file, and the text tab lists them."""

    def __init__(self, folder: Path, run: Run) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder, self._writer, self._files = folder, EventFileWriter(str(folder)), list[str]()
        self._last = Point(0, time.time(), {})
        self._parameters = dict(run.parameters)
        if run.parameters:
            self._write_text(
                "parameters", _table([{"parameter": k, "value": str(v)} for k, v in run.parameters.items()])
            )

    def log(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            self._last = point
            self._write([Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()])
        self._writer.flush()

    def summarize(self, values: Mapping[str, Any], text: str) -> None:
        fence = "`" * (3 + text.count("`"))  # no name in the card can close it
        self._write_text("card", f"{fence}\n{text}\n{fence}")
        if self._parameters:
            self._write_hparams([name for name in values if name in self._last.values])

    def add_table(self, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        self._write_text(name, _table(rows))

    def add_file(self, path: Path) -> None:
        shutil.copy(path, self._folder / path.name)
        self._files.append(path.name)

    def close(self) -> None:
        if self._files:
            self._write_text("files", _table([{"file": str(self._folder / name)} for name in self._files]))
        self._writer.close()

    def _write(self, values: Sequence[Any]) -> None:
        """Write values at the last step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        step, time_s = self._last.step, self._last.time_s
        self._writer.add_event(Event(step=step, wall_time=time_s, summary=Summary(value=values)))

    def _write_text(self, name: str, markdown: str) -> None:
        from tensorboard.compat.proto import types_pb2
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.plugins.text.metadata import create_summary_metadata

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=types_pb2.DT_STRING, string_val=[markdown.encode()], tensor_shape=shape)
        metadata = create_summary_metadata(display_name=None, description=None)
        self._write([Summary.Value(tag=f"stepscope/{name}", metadata=metadata, tensor=tensor)])

    def _write_hparams(self, metrics: Sequence[str]) -> None:
        """Write the parameters for the HPARAMS tab, with the names of the figures beside them."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        start, end = plugin_data_pb2.SessionStartInfo(), plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS)
        for name, value in self._parameters.items():
            field = "bool_value" if isinstance(value, bool) else "number_value"
            field, value = (field, value) if isinstance(value, (int, float)) else ("string_value", str(value))
            setattr(start.hparams[name], field, value)
        experiment = api_pb2.Experiment(
            hparam_infos=[api_pb2.HParamInfo(name=name) for name in self._parameters],
            metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=name)) for name in metrics],
        )
        for tag, content in (
            (metadata.EXPERIMENT_TAG, {"experiment": experiment}),
            (metadata.SESSION_START_INFO_TAG, {"session_start_info": start}),
            (metadata.SESSION_END_INFO_TAG, {"session_end_info": end}),
        ):
            data = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **content)
            of_plugin = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=data.SerializeToString())
            self._write([Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=of_plugin))])


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows as a Markdown table."""
    if not rows:
        return "none"
    head = list(rows[0])
    return "\n".join(grid(head, [[prose(row[name]) for name in head] for row in rows], [":--"] * len(head)))
