"""Messages between the driver and the nodes' agents, with bounds, as a node may be hostile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypedDict

import msgspec

from ...core.errors import TrainerError
from ...core.liveness import memory_error_line
from ...monitor.gpu import VisibleGpu
from ...records.store.schema import MAX_PROBLEM_CHARACTERS, MAX_PROBLEMS, Count, GpuSample, SystemRecord, TaskSample, line_fields
from .messages import FILE_PIECE_BYTES, MAX_ERROR_CHARACTERS, MAX_PEERS_PROBED, MAX_STACK_CHARACTERS, ProtocolNumber, WireMessage

Label = Annotated[str, msgspec.Meta(max_length=255)]  # a host's name; names of interfaces and addresses are shorter
Flag = Annotated[str, msgspec.Meta(max_length=64)]  # of a processor: the longest have about twenty characters
Name = Annotated[str, msgspec.Meta(max_length=4096)]
FileName = Annotated[bytes, msgspec.Meta(max_length=4096)]  # by `os.fsencode`, as it may be no Unicode
Text = Annotated[str, msgspec.Meta(max_length=1 << 17)]  # longer than a log's longest last line (64 KiB)
Code = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
Pid = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=2**20)]
Duration = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
ErrorText = Annotated[str, msgspec.Meta(max_length=MAX_ERROR_CHARACTERS)]
Json = str  # a JSON document as text: prepared once for many messages, and agents pass it on
MAX_INTERFACES = MAX_PACKAGES = 4096
MAX_GPUS = 1024
MAX_CPU_FLAGS = 1000


class _Fields(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message."""


Arrival = Literal["requested", "command", "ending", "sample"] | int


class FromNode(WireMessage):
    """Message of an agent, accepted only when it `ARRIVES` as declared; undeclared is refused.

    requested: once per request; command: about a leading task's command; ending: between the request to stop and `Stopped`; sample: as the
    interval allows; a number: unrequested, at most so often from a task, or from an agent if it has no `task`.
    """

    ARRIVES: ClassVar[Arrival] = 0


class TaskReport(FromNode, rename={"task": "from"}, kw_only=True):
    """Message of a task, to which its agent adds the task's name."""

    task: Name = ""


class ToNode(WireMessage):
    """Request of the driver."""


class ToTask(WireMessage, kw_only=True):
    """Message to the task `to`, which its agent passes on."""

    to: str = ""


class Identity(_Fields):
    """Machine and network of a node."""

    boot: Name
    network: Name


class _Interface(_Fields):
    addresses: Annotated[list[Label], msgspec.Meta(max_length=4096)]
    up: bool | None
    mtu_bytes: Count | None
    speed_bits_per_second: Count | None


class _Gpu(_Fields):
    name: Name | None
    memory_total_bytes: Count | None
    uuid: Name | None


class _VisibleGpu(_Fields):
    visible_as: Name
    uuid: Name | None
    gpu: Number | None


class Host(_Fields):
    """Description of a node, as in ``env.json``."""

    hostname: Label | None
    cpu_model: Name | None
    cpu_flags: Annotated[list[Flag], msgspec.Meta(max_length=MAX_CPU_FLAGS)] | None
    cores_logical: Count | None
    cores_physical: Count | None
    cores_affinity: Count | None
    cores_quota: Duration | None
    cores_available: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None
    memory_total_bytes: Count
    memory_limit_bytes: Count | None
    interfaces: Annotated[dict[Label, _Interface], msgspec.Meta(max_length=MAX_INTERFACES)]
    operating_system: Name
    kernel: Name
    machine: Name
    python: Name
    packages: Annotated[dict[Name, Name | None], msgspec.Meta(max_length=MAX_PACKAGES)]
    gpus: Annotated[list[_Gpu], msgspec.Meta(max_length=MAX_GPUS)] | None
    gpu_driver: Name | None
    gpu_problem: Name | None
    visible_gpus: Annotated[list[_VisibleGpu], msgspec.Meta(max_length=MAX_GPUS)] | None


# Of a sample, whose fields are those of its record: all of them, and no others

MAX_INTERVAL_SECONDS = 1e7  # between two samples (four months); a record holds sums of thousands
Figure = Annotated[float, msgspec.Meta(ge=-(2**53), le=2**53)]  # means stay finite and readable


if TYPE_CHECKING:
    _SampledRecord = Any
else:
    _gpus = Annotated[list[Name], msgspec.Meta(max_length=MAX_GPUS)]
    _SampledGpu = TypedDict("_SampledGpu", line_fields(GpuSample, Figure, name=Label | None, tasks=_gpus), total=False)
    _SampledTask = msgspec.defstruct("TaskSample", line_fields(TaskSample, Figure).items(), forbid_unknown_fields=True)
    _Problem = Annotated[str, msgspec.Meta(max_length=MAX_PROBLEM_CHARACTERS)]
    _bounded = line_fields(
        SystemRecord,
        Figure,
        interval_seconds=Annotated[float, msgspec.Meta(ge=0, le=MAX_INTERVAL_SECONDS)],
        network_source=Label | None,
        interfaces=Annotated[dict[Label, tuple[Count, Count]], msgspec.Meta(max_length=MAX_INTERFACES)] | None,
        gpus=Annotated[list[_SampledGpu], msgspec.Meta(max_length=MAX_GPUS)] | None,
        tasks=list[_SampledTask],
        problems=Annotated[list[_Problem], msgspec.Meta(max_length=MAX_PROBLEMS)],
    )
    _SampledRecord = msgspec.defstruct("SystemRecord", _bounded.items(), forbid_unknown_fields=True)


class Sample(FromNode):
    """Resource sample of a node."""

    ARRIVES: ClassVar = "sample"

    record: _SampledRecord

    def as_record(self, node: int) -> SystemRecord:
        """Return the record of this node, whatever node the sample claims."""
        self.record.node = node
        return msgspec.convert(self.record, SystemRecord, from_attributes=True)


# From agents


class Hello(FromNode):
    """Greeting of an agent, which describes its node."""

    ARRIVES: ClassVar = "requested"

    protocol: ProtocolNumber
    node: Number
    pid: Pid
    identity: Identity
    host: Host
    scratch: FileName
    address: Name | None


class OtherRelease(WireMessage, tag="hello"):
    """Greeting of an agent with another protocol, of which nothing else is known."""

    ARRIVES: ClassVar = "requested"

    protocol: int


class Leaving(FromNode):
    """The node is going to be ended."""

    ARRIVES: ClassVar = "requested"


class Ports(FromNode):
    """Reserved ports."""

    ARRIVES: ClassVar = "requested"

    ports: Annotated[list[Port], msgspec.Meta(max_length=65535)]


class Sampled(FromNode):
    """The requested sample was sent."""

    ARRIVES: ClassVar = "requested"


class States(FromNode):
    """The kernel's state letter of each task; ``gone``: ended, with its death not reported yet."""

    ARRIVES: ClassVar = "requested"

    states: dict[Name, Annotated[str, msgspec.Meta(pattern=r"\A(?:[A-Za-z]|gone)\Z")]]


class _Stack(_Fields):
    text: Annotated[str, msgspec.Meta(max_length=MAX_STACK_CHARACTERS)]
    problem: Annotated[str, msgspec.Meta(max_length=1000)] | None


class Stacks(FromNode):
    """Stacks of tasks, the answer to request `number`."""

    ARRIVES: ClassVar = "requested"

    number: Count
    stacks: Annotated[dict[Name, _Stack], msgspec.Meta(max_length=4096)]


class ProbePort(FromNode):
    """The port on which the agent listens for other agents."""

    ARRIVES: ClassVar = "requested"

    number: Count
    port: Port | None


_Nodes = Annotated[list[Number], msgspec.Meta(max_length=MAX_PEERS_PROBED)]


class PeersProbed(FromNode):
    """The nodes that were `reached`, and those whose datagrams were `heard`."""

    ARRIVES: ClassVar = "requested"

    number: Count
    reached: _Nodes
    heard: _Nodes


class Stopped(FromNode):
    """All tasks have ended."""

    ARRIVES: ClassVar = "requested"


class Log(FromNode):
    """A piece of a task's log; `task` is checked as a file name where it is written."""

    ARRIVES: ClassVar = "ending"
    ARRAYS: ClassVar = {"text": ("|u1", 1)}
    MAX_BYTES: ClassVar = FILE_PIECE_BYTES

    task: Name


class Trace(FromNode):
    """A piece of a file of a profile; `path` is checked where it is written."""

    ARRIVES: ClassVar = "ending"
    ARRAYS: ClassVar = {"data": ("|u1", 1)}
    MAX_BYTES: ClassVar = FILE_PIECE_BYTES

    path: Name


class Death(FromNode):
    """The end of a task; `order` counts the node's deaths.

    A failed start has no pid, code or signal. CPU seconds are from wait4(2), with the task's children; None if the fork server has ended,
    too. `oom_kills` counts the machine's processes killed for memory during the task; None if unknown, or if the task exited by itself.
    """

    ARRIVES: ClassVar = 1

    task: Name
    pid: Pid | None
    code: Code | None
    signal: Name | None
    order: Number
    cpu_seconds: Duration | None
    max_rss_bytes: Count | None
    tail: Annotated[list[Text], msgspec.Meta(max_length=1000)]
    oom_kills: Count | None = None


class Phase(TaskReport):
    """What a starting task does."""

    ARRIVES: ClassVar = 100  # a start has about six

    name: Name


class Error(TaskReport):
    """Error that ends a task; `peer_lost`: its only cause is the loss of a peer."""

    ARRIVES: ClassVar = 10

    type: Name
    message: ErrorText
    errno: Code | None
    exit_code: Code | None
    peer_lost: bool
    out_of_memory: ErrorText | None = None

    @classmethod
    def from_exception(cls, error: BaseException, *, peer_lost: bool) -> Error:
        """Return the message about an exception."""
        out_of_memory = memory_error_line(error)
        return cls(
            type=_sendable(type(error).__name__),
            message=_sendable(str(error)),
            errno=_code(error.errno) if isinstance(error, OSError) else None,
            exit_code=_code(error.exit_code) if isinstance(error, TrainerError) else None,
            peer_lost=peer_lost,
            out_of_memory=None if out_of_memory is None else _sendable(out_of_memory),
        )


def _sendable(text: str) -> str:
    """Truncate a text, and escape non-Unicode characters, as in file names."""
    return text.encode(errors="backslashreplace").decode()[:MAX_ERROR_CHARACTERS]


def _code(number: object) -> int | None:
    """Return an error number; None for others, as in ``OSError("could not load", path)``."""
    return number if type(number) is int and -(2**31) <= number < 2**31 else None


# From the driver


class Prepare(ToNode, forbid_unknown_fields=False):  # an agent of another release answers with its protocol
    """First message: prestart the workers of `job`.

    `workers_before` of them are on lower nodes of the same machine. The other fields are for agents, which do not read the job; a standby
    process gets none of them.
    """

    job: Json
    backend: str = ""
    device: str = ""
    node_timeout_seconds: float = 0.0
    keeps_spares: bool = False
    tasks: int = 0
    workers_before: int = 0
    workers_on_machine: int = 0


class Reserve(ToNode):
    """Reserve ports."""

    count: int


class PlacedTask(_Fields):
    """A task to start; `cluster` is `core.cluster.Cluster` as JSON."""

    task: str
    cluster: Json
    threads: int
    local_index: int


class Open(ToTask):
    """The agent's first message to a task, or the second to a standby process.

    A standby process moves its output from `early_log` to `log`.
    """

    job: Json
    start_deadline: float
    task: PlacedTask
    normalisation: Any = None
    placeholder: Mapping[str, Any] | None = None
    log: bytes | None = None
    early_log: bytes | None = None
    profile_folder: bytes | None = None


class Start(ToNode):
    """Tasks to start, or to restart `again`, after the end of what remains of them.

    Without `log_folder` their logs are sent, without `sample_interval_seconds` no samples.
    """

    job: Json
    log_folder: bytes | None
    sample_interval_seconds: float | None
    isolated: bool | None
    cores_available: float | None
    gpu_of_task: Mapping[str, VisibleGpu]
    start_seconds: float
    profiles: bool = False
    normalisation: Any = None  # `DataInfo.normalisation`, if not that of the data
    placeholder: Mapping[str, Any] | None = None  # description of data that is not there
    tasks: Sequence[PlacedTask] = ()
    again: bool = False


class Spares(ToNode):
    """Keep a standby process for each task."""

    job: Json


class SampleNow(ToNode):
    """Send a sample."""


class Inspect(ToNode):
    """Report the tasks' states."""


class FindStacks(ToNode):
    """Send the stacks of tasks."""

    number: int
    tasks: Sequence[str]


class OpenProbe(ToNode):
    """Listen for other agents."""

    number: int


class ProbePeers(ToNode):
    """Try to reach the agents at these ports of nodes."""

    number: int
    ports: Mapping[int, int]
    token: str


class Kill(ToNode):
    """Kill a task."""

    task: str


class Stop(ToNode):
    """End all tasks: wait for them first, then kill them."""

    grace_seconds: float


class Finish(ToNode):
    """The end of the run, the last message."""

    exit_code: int
