"""One event as decoded, and how a trace's text becomes a list of them."""

import msgspec
from msgspec import Raw, field

Number = int | float | str | bool | None  # producers write ids as numbers or text: both are accepted, columns decide

NOTHING = Raw()


class Args(msgspec.Struct, frozen=True, gc=False):
    """The used fields of an event's `args`, in the profiler's order, which decodes fastest."""

    external_id: Number = field(name="External id", default=None)
    old_external_id: Number = field(name="external id", default=None)
    record_function: Number = field(name="Record function id", default=None)
    sequence: Number = field(name="Sequence number", default=None)
    forward_thread: Number = field(name="Fwd thread id", default=None)
    inputs: Raw = field(name="Concrete Inputs", default=NOTHING)
    dtypes: Raw = field(name="Input type", default=NOTHING)
    strides: Raw = field(name="Input Strides", default=NOTHING)
    shapes: Raw = field(name="Input Dims", default=NOTHING)
    device: Number = None
    stream: Number = None
    correlation: Number = None
    bytes: Number = None
    registers_per_thread: Number = field(name="registers per thread", default=None)
    shared_memory_bytes: Number = field(name="shared memory", default=None)
    grid: Raw = NOTHING
    block: Raw = NOTHING
    occupancy_percent: Number = field(name="est. achieved occupancy %", default=None)
    graph: Number = field(name="graph id", default=None)
    graph_node: Number = field(name="graph node id", default=None)
    reserved_bytes: Number = field(name="Total Reserved", default=None)
    allocated_bytes: Number = field(name="Total Allocated", default=None)
    memory_bytes: Number = field(name="Bytes", default=None)
    memory_device: Number = field(name="Device Id", default=None)
    device_type: Number = field(name="Device Type", default=None)
    address: Number = field(name="Addr", default=None)
    stack: Number = field(name="Call stack", default=None)
    collective: Number = field(name="Collective name", default=None)
    dtype: Number = None
    num_in_elements: Number = field(name="In msg nelems", default=None)
    num_out_elements: Number = field(name="Out msg nelems", default=None)
    group_size: Number = field(name="Group size", default=None)
    group: Number = field(name="Process Group Name", default=None)
    group_ranks: Raw = field(name="Process Group Ranks", default=NOTHING)
    wait_on_stream: Number = None
    wait_on_correlation: Number = field(name="wait_on_cuda_event_record_corr_id", default=None)
    name: Number = None
    labels: Number = None


NO_ARGS = Args()


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event. Times stay text until they become integers: a float would lose nanoseconds."""

    ph: str = ""
    cat: str | None = ""
    name: str = ""
    pid: Number = None
    tid: Number = None
    ts: Raw = NOTHING
    dur: Raw = NOTHING
    args: Args = NO_ARGS


decode_event = msgspec.json.Decoder(Event).decode
decode_events = msgspec.json.Decoder(list[Event]).decode
