from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Version(_message.Message):
    __slots__ = ("lineage", "n")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    n: int
    def __init__(self, lineage: _Optional[int] = ..., n: _Optional[int] = ...) -> None: ...

class Merged(_message.Message):
    __slots__ = ("generation", "seq")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    generation: int
    seq: int
    def __init__(self, generation: _Optional[int] = ..., seq: _Optional[int] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "shape", "dtype", "averaged", "aliases", "kind", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    AVERAGED_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    averaged: bool
    aliases: _containers.RepeatedScalarFieldContainer[str]
    kind: str
    value: bytes
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., averaged: _Optional[bool] = ..., aliases: _Optional[_Iterable[str]] = ..., kind: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class Constant(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: bytes
    def __init__(self, name: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("steps", "tokens", "loss_sum", "overwritten", "lost")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    OVERWRITTEN_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    steps: int
    tokens: int
    loss_sum: float
    overwritten: _containers.RepeatedScalarFieldContainer[int]
    lost: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, steps: _Optional[int] = ..., tokens: _Optional[int] = ..., loss_sum: _Optional[float] = ..., overwritten: _Optional[_Iterable[int]] = ..., lost: _Optional[_Iterable[int]] = ...) -> None: ...

class Blocked(_message.Message):
    __slots__ = ("cause", "ns")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    NS_FIELD_NUMBER: _ClassVar[int]
    cause: str
    ns: int
    def __init__(self, cause: _Optional[str] = ..., ns: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("blocked", "step_ns", "step_ns_max", "gap_ns_max")
    BLOCKED_FIELD_NUMBER: _ClassVar[int]
    STEP_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_NS_MAX_FIELD_NUMBER: _ClassVar[int]
    GAP_NS_MAX_FIELD_NUMBER: _ClassVar[int]
    blocked: _containers.RepeatedCompositeFieldContainer[Blocked]
    step_ns: int
    step_ns_max: int
    gap_ns_max: int
    def __init__(self, blocked: _Optional[_Iterable[_Union[Blocked, _Mapping]]] = ..., step_ns: _Optional[int] = ..., step_ns_max: _Optional[int] = ..., gap_ns_max: _Optional[int] = ...) -> None: ...

class LearnerEnvelope(_message.Message):
    __slots__ = ("hello", "report", "heartbeat", "announce", "declare", "leave", "more")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    DECLARE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    report: Report
    heartbeat: Heartbeat
    announce: Announce
    declare: Declare
    leave: Leave
    more: _containers.RepeatedCompositeFieldContainer[LearnerEnvelope]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., announce: _Optional[_Union[Announce, _Mapping]] = ..., declare: _Optional[_Union[Declare, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., more: _Optional[_Iterable[_Union[LearnerEnvelope, _Mapping]]] = ...) -> None: ...

class SyncerEnvelope(_message.Message):
    __slots__ = ("welcome", "refuse", "seed_request", "pace", "fate", "update_ready", "finishing", "final_round", "finished", "replaced", "more")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    SEED_REQUEST_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_READY_FIELD_NUMBER: _ClassVar[int]
    FINISHING_FIELD_NUMBER: _ClassVar[int]
    FINAL_ROUND_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refuse: Refuse
    seed_request: SeedRequest
    pace: Pace
    fate: Fate
    update_ready: UpdateReady
    finishing: Finishing
    final_round: FinalRound
    finished: Finished
    replaced: Replaced
    more: _containers.RepeatedCompositeFieldContainer[SyncerEnvelope]
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refuse: _Optional[_Union[Refuse, _Mapping]] = ..., seed_request: _Optional[_Union[SeedRequest, _Mapping]] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ..., fate: _Optional[_Union[Fate, _Mapping]] = ..., update_ready: _Optional[_Union[UpdateReady, _Mapping]] = ..., finishing: _Optional[_Union[Finishing, _Mapping]] = ..., final_round: _Optional[_Union[FinalRound, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., replaced: _Optional[_Union[Replaced, _Mapping]] = ..., more: _Optional[_Iterable[_Union[SyncerEnvelope, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "run_id", "name", "generation", "fingerprint", "tensors", "extra")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: str
    name: str
    generation: int
    fingerprint: str
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    extra: str
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[str] = ..., name: _Optional[str] = ..., generation: _Optional[int] = ..., fingerprint: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., extra: _Optional[str] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("counters", "timings", "sent_ns")
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    counters: Counters
    timings: Timings
    sent_ns: int
    def __init__(self, counters: _Optional[_Union[Counters, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., sent_ns: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("steps", "waiting", "progress_bytes")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_BYTES_FIELD_NUMBER: _ClassVar[int]
    steps: int
    waiting: bool
    progress_bytes: int
    def __init__(self, steps: _Optional[int] = ..., waiting: _Optional[bool] = ..., progress_bytes: _Optional[int] = ...) -> None: ...

class Announce(_message.Message):
    __slots__ = ("seq", "piece", "slot", "anchor", "own_step", "c_steps", "c_tokens", "counters", "size_bytes", "final")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    OWN_STEP_FIELD_NUMBER: _ClassVar[int]
    C_STEPS_FIELD_NUMBER: _ClassVar[int]
    C_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    seq: int
    piece: int
    slot: int
    anchor: Version
    own_step: int
    c_steps: int
    c_tokens: int
    counters: Counters
    size_bytes: int
    final: bool
    def __init__(self, seq: _Optional[int] = ..., piece: _Optional[int] = ..., slot: _Optional[int] = ..., anchor: _Optional[_Union[Version, _Mapping]] = ..., own_step: _Optional[int] = ..., c_steps: _Optional[int] = ..., c_tokens: _Optional[int] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., size_bytes: _Optional[int] = ..., final: _Optional[bool] = ...) -> None: ...

class Declare(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Leave(_message.Message):
    __slots__ = ("reason", "counters", "timings")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    counters: Counters
    timings: Timings
    def __init__(self, reason: _Optional[str] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...

class Setting(_message.Message):
    __slots__ = ("name", "text", "number", "real")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    number: int
    real: float
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ..., number: _Optional[int] = ..., real: _Optional[float] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("generation", "epoch", "resumed", "settings", "slot", "slot_interval_ns", "phase", "merged", "bulk_port", "constants")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_INTERVAL_NS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    BULK_PORT_FIELD_NUMBER: _ClassVar[int]
    CONSTANTS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    epoch: int
    resumed: bool
    settings: _containers.RepeatedCompositeFieldContainer[Setting]
    slot: int
    slot_interval_ns: int
    phase: str
    merged: _containers.RepeatedCompositeFieldContainer[Merged]
    bulk_port: int
    constants: _containers.RepeatedCompositeFieldContainer[Constant]
    def __init__(self, generation: _Optional[int] = ..., epoch: _Optional[int] = ..., resumed: _Optional[bool] = ..., settings: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ..., slot: _Optional[int] = ..., slot_interval_ns: _Optional[int] = ..., phase: _Optional[str] = ..., merged: _Optional[_Iterable[_Union[Merged, _Mapping]]] = ..., bulk_port: _Optional[int] = ..., constants: _Optional[_Iterable[_Union[Constant, _Mapping]]] = ...) -> None: ...

class Refuse(_message.Message):
    __slots__ = ("kind", "message")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class SeedRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pace(_message.Message):
    __slots__ = ("slot", "slot_interval_ns", "slack_ns", "echo_ns", "echo_age_ns")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_INTERVAL_NS_FIELD_NUMBER: _ClassVar[int]
    SLACK_NS_FIELD_NUMBER: _ClassVar[int]
    ECHO_NS_FIELD_NUMBER: _ClassVar[int]
    ECHO_AGE_NS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    slot_interval_ns: int
    slack_ns: int
    echo_ns: int
    echo_age_ns: int
    def __init__(self, slot: _Optional[int] = ..., slot_interval_ns: _Optional[int] = ..., slack_ns: _Optional[int] = ..., echo_ns: _Optional[int] = ..., echo_age_ns: _Optional[int] = ...) -> None: ...

class Fate(_message.Message):
    __slots__ = ("piece", "seq", "slot", "fate", "reason", "late")
    PIECE_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    piece: int
    seq: int
    slot: int
    fate: str
    reason: str
    late: str
    def __init__(self, piece: _Optional[int] = ..., seq: _Optional[int] = ..., slot: _Optional[int] = ..., fate: _Optional[str] = ..., reason: _Optional[str] = ..., late: _Optional[str] = ...) -> None: ...

class UpdateReady(_message.Message):
    __slots__ = ("piece", "version", "slot", "size_bytes", "hash", "merged")
    PIECE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    piece: int
    version: Version
    slot: int
    size_bytes: int
    hash: str
    merged: Merged
    def __init__(self, piece: _Optional[int] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., slot: _Optional[int] = ..., size_bytes: _Optional[int] = ..., hash: _Optional[str] = ..., merged: _Optional[_Union[Merged, _Mapping]] = ...) -> None: ...

class Finishing(_message.Message):
    __slots__ = ("slot",)
    SLOT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    def __init__(self, slot: _Optional[int] = ...) -> None: ...

class FinalRound(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[Version]
    def __init__(self, versions: _Optional[_Iterable[_Union[Version, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[Version]
    def __init__(self, versions: _Optional[_Iterable[_Union[Version, _Mapping]]] = ...) -> None: ...

class Replaced(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ContributionId(_message.Message):
    __slots__ = ("run_id", "name", "generation", "piece", "seq")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    name: str
    generation: int
    piece: int
    seq: int
    def __init__(self, run_id: _Optional[str] = ..., name: _Optional[str] = ..., generation: _Optional[int] = ..., piece: _Optional[int] = ..., seq: _Optional[int] = ...) -> None: ...

class UploadStateResult(_message.Message):
    __slots__ = ("offset", "unwanted")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    UNWANTED_FIELD_NUMBER: _ClassVar[int]
    offset: int
    unwanted: bool
    def __init__(self, offset: _Optional[int] = ..., unwanted: _Optional[bool] = ...) -> None: ...

class UploadHeader(_message.Message):
    __slots__ = ("id", "size_bytes", "offset")
    ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    id: ContributionId
    size_bytes: int
    offset: int
    def __init__(self, id: _Optional[_Union[ContributionId, _Mapping]] = ..., size_bytes: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class UploadChunk(_message.Message):
    __slots__ = ("header", "data", "seal")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    header: UploadHeader
    data: bytes
    seal: str
    def __init__(self, header: _Optional[_Union[UploadHeader, _Mapping]] = ..., data: _Optional[bytes] = ..., seal: _Optional[str] = ...) -> None: ...

class UploadResult(_message.Message):
    __slots__ = ("unwanted",)
    UNWANTED_FIELD_NUMBER: _ClassVar[int]
    unwanted: bool
    def __init__(self, unwanted: _Optional[bool] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("run_id", "name", "generation", "piece", "version", "resume_version", "resume_offset", "whole")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RESUME_VERSION_FIELD_NUMBER: _ClassVar[int]
    RESUME_OFFSET_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    name: str
    generation: int
    piece: int
    version: Version
    resume_version: Version
    resume_offset: int
    whole: bool
    def __init__(self, run_id: _Optional[str] = ..., name: _Optional[str] = ..., generation: _Optional[int] = ..., piece: _Optional[int] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., resume_version: _Optional[_Union[Version, _Mapping]] = ..., resume_offset: _Optional[int] = ..., whole: _Optional[bool] = ...) -> None: ...

class DownloadHeader(_message.Message):
    __slots__ = ("version", "slot", "size_bytes", "hash", "merged", "offset")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    version: Version
    slot: int
    size_bytes: int
    hash: str
    merged: Merged
    offset: int
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., slot: _Optional[int] = ..., size_bytes: _Optional[int] = ..., hash: _Optional[str] = ..., merged: _Optional[_Union[Merged, _Mapping]] = ..., offset: _Optional[int] = ...) -> None: ...

class DownloadChunk(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: DownloadHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[DownloadHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ObserveRequest(_message.Message):
    __slots__ = ("protocol",)
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    def __init__(self, protocol: _Optional[int] = ...) -> None: ...

class ObserveResult(_message.Message):
    __slots__ = ("run_id", "bulk_port", "payload", "fragments", "fingerprint", "tensors", "extra")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BULK_PORT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    bulk_port: int
    payload: str
    fragments: int
    fingerprint: str
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    extra: str
    def __init__(self, run_id: _Optional[str] = ..., bulk_port: _Optional[int] = ..., payload: _Optional[str] = ..., fragments: _Optional[int] = ..., fingerprint: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., extra: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("run_id", "have", "wait_ns")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    have: _containers.RepeatedScalarFieldContainer[str]
    wait_ns: int
    def __init__(self, run_id: _Optional[str] = ..., have: _Optional[_Iterable[str]] = ..., wait_ns: _Optional[int] = ...) -> None: ...

class PublishedPiece(_message.Message):
    __slots__ = ("version", "slot", "size_bytes", "hash")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    version: Version
    slot: int
    size_bytes: int
    hash: str
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., slot: _Optional[int] = ..., size_bytes: _Optional[int] = ..., hash: _Optional[str] = ...) -> None: ...

class FetchHeader(_message.Message):
    __slots__ = ("pieces", "over")
    PIECES_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    pieces: _containers.RepeatedCompositeFieldContainer[PublishedPiece]
    over: bool
    def __init__(self, pieces: _Optional[_Iterable[_Union[PublishedPiece, _Mapping]]] = ..., over: _Optional[bool] = ...) -> None: ...

class FetchChunk(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: FetchHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[FetchHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...
