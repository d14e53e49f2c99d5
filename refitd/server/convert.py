"""Commands of the control plane <-> request and response messages, one pair of functions per RPC that needs them.

The only file of the server that knows both sides; records that others carry too are in refitd.rpc.convert. Called by
the servicers. What the wire cannot leave out is checked here (an unset run, an unknown enum value); what a value means
is the control plane's business.
"""

from __future__ import annotations

from refitd.control import commands as c
from refitd.domain.errors import Invalid
from refitd.domain.version import HandOut
from refitd.rpc import convert as records
from refitd.v1 import admin_pb2 as admin
from refitd.v1 import agents_pb2 as agents
from refitd.v1 import types_pb2 as types
from refitd.v1 import versions_pb2 as versions


def header(value: c.Header) -> types.ResponseHeader:
    return types.ResponseHeader(revision=value.revision, term=value.term)


def prepare_request(value: versions.PrepareRequest) -> c.PrepareRequest:
    refused = value.HasField("refusal")
    if refused and value.hand_out == types.HAND_OUT_UNSPECIFIED:
        hand_out = HandOut.SNAPSHOT  # a rank that refuses hands nothing out
    else:
        hand_out = records.hand_out_from_proto(value.hand_out)
    unknown = value.gather_need == versions.GATHER_NEED_UNSPECIFIED
    return c.PrepareRequest(
        model=value.model,
        run=records.run_from_proto(value.run),
        rank=value.rank,
        world_size=value.world_size,
        agent_id=value.agent_id,
        vote_id=value.vote_id,
        step=value.step,
        request_id=value.request_id,
        gather_need=None if unknown else records.gather_need_from_proto(value.gather_need),
        refusal=records.problem_from_proto(value.refusal) if refused else None,
        layout_hash=value.layout_hash,
        hand_out=hand_out,
        schema_change=value.schema_change,
        capacity=value.capacity,
        metadata=dict(value.metadata),
        finalise_pending=value.finalise_pending,
    )


def prepare_response(value: c.PrepareResponse) -> versions.PrepareResponse:
    return versions.PrepareResponse(
        header=header(value.header),
        attempt_id=value.attempt_id,
        decision=records.decision_to_proto(value.decision),
        version=value.version,
        problem=None if value.problem is None else records.problem_to_proto(value.problem),
        compare_with=value.compare_with,
        placement_id=value.placement_id,
        kept_versions=value.kept_versions,
        confirm_endpoint=value.confirm_endpoint,
        confirm_key=value.confirm_key,
        vote_ids=value.vote_ids,
        finalise=value.finalise,
    )


def placement_response(value: c.GetPlacementResponse) -> versions.GetPlacementResponse:
    return versions.GetPlacementResponse(
        header=header(value.header),
        classes=[versions.ReplicationClass(ranks=ranks) for ranks in value.classes],
        fragment_classes=value.fragment_classes,
        fragment_kept=value.fragment_kept,
    )


def stage_request(value: versions.StageRequest) -> c.StageRequest:
    proven = value.evidence != types.EVIDENCE_UNSPECIFIED
    roots = records.roots_from_proto(value.roots)
    return c.StageRequest(
        model=value.model,
        run=records.run_from_proto(value.run),
        rank=value.rank,
        version=value.version,
        attempt_id=value.attempt_id,
        layout_hash=value.layout_hash,
        roots=tuple(c.ClassRoot(index, root) for index, root in sorted(roots.items())),
        evidence=records.evidence_from_proto(value.evidence) if proven else None,
        arena=records.slot_from_proto(value.arena) if value.HasField("arena") else None,
        gathered=value.gathered,
        num_bytes=value.num_bytes,
        timings=records.timings_from_proto(value.timings),
        no_gather_reason=value.no_gather_reason,
    )


def seal_request(value: versions.SealRequest) -> c.SealRequest:
    return c.SealRequest(value.model, records.run_from_proto(value.run), value.rank, value.version)


def seal_response(value: c.SealResponse) -> versions.SealResponse:
    return versions.SealResponse(
        header=header(value.header),
        state=records.state_to_proto(value.state),
        version=value.version,
        digest=value.digest,
        evidence=records.evidence_to_proto(value.evidence),
        disputed_classes=value.disputed_classes,
    )


def report_digests_request(value: versions.ReportDigestsRequest) -> c.ReportDigestsRequest:
    lists = tuple(c.DigestList(entry.class_index, tuple(entry.digests)) for entry in value.lists)
    return c.ReportDigestsRequest(value.model, records.run_from_proto(value.run), value.rank, value.version, lists)


def abort_request(value: versions.AbortRequest) -> c.AbortRequest:
    problem = records.problem_from_proto(value.problem) if value.HasField("problem") else None
    return c.AbortRequest(value.model, records.run_from_proto(value.run), value.rank, value.version, problem)


def list_versions_response(value: c.ListVersionsResponse) -> versions.ListVersionsResponse:
    return versions.ListVersionsResponse(
        header=header(value.header),
        versions=[records.version_to_proto(version, with_shares=False) for version in value.versions],
        next_page_token=value.next_page_token,
    )


def watch_request(value: versions.WatchRequest) -> c.WatchRequest:
    interval = records.duration_from_proto(value.progress_interval) if value.HasField("progress_interval") else None
    return c.WatchRequest(value.model, value.from_revision, value.agent_id, interval)


def register_request(value: agents.RegisterRequest) -> c.RegisterRequest:
    role = records.role_from_proto(value.role)
    kind = value.WhichOneof("kind")
    if kind is not None and kind != role.value:
        raise Invalid(f"an agent of role {role.value} was described as {kind}", field="kind")
    return c.RegisterRequest(
        model=value.model,
        role=role,
        incarnation=value.incarnation,
        host=value.host,
        ttl=records.duration_from_proto(value.ttl) if value.HasField("ttl") else None,
        trainer=records.trainer_from_proto(value.trainer) if kind == "trainer" else None,
        engine=records.engine_from_proto(value.engine) if kind == "engine" else None,
    )


def report_replica_request(value: agents.ReportReplicaRequest) -> c.ReportReplicaRequest:
    return c.ReportReplicaRequest(
        agent_id=value.agent_id,
        state=records.replica_state_from_proto(value.state),
        installed_version=value.installed_version,
        pending_version=value.pending_version,
        problem=records.problem_from_proto(value.problem) if value.HasField("problem") else None,
        timings=records.timings_from_proto(value.timings),
        num_bytes=value.num_bytes,
        transport=records.transport_from_proto(value.transport),
        choice_reason=value.choice_reason,
    )


def status_response(value: c.GetStatusResponse) -> admin.GetStatusResponse:
    return admin.GetStatusResponse(
        header=header(value.header),
        server_version=value.server_version,
        started_at=records.timestamp_to_proto(value.started_at),
        models=[_model_status(model) for model in value.models],
        num_watchers=value.num_watchers,
    )


def _model_status(value: c.ModelStatus) -> admin.ModelStatus:
    return admin.ModelStatus(
        model=value.model,
        newest=None if value.newest is None else records.version_to_proto(value.newest, with_shares=False),
        current_run=None if value.current_run is None else records.run_to_proto(value.current_run),
        kept_versions=value.kept_versions,
        agents=[_agent_status(agent) for agent in value.agents],
        pins=[admin.PinStatus(version=pin.version, replica=pin.replica) for pin in value.pins],
        attempt=None if value.attempt is None else _attempt_status(value.attempt),
        num_sealed_total=value.num_sealed_total,
        num_refused_total=value.num_refused_total,
        last_problem=None if value.last_problem is None else records.problem_to_proto(value.last_problem),
        num_fence_holders=value.num_fence_holders,
        num_fence_waits=value.num_fence_waits,
        num_checkpoints=value.num_checkpoints,
    )


def _agent_status(value: c.AgentStatus) -> admin.AgentStatus:
    return admin.AgentStatus(
        agent_id=value.agent_id,
        role=records.role_to_proto(value.role),
        host=value.host,
        alive=value.alive,
        since_last_seen=records.duration_to_proto(value.since_last_seen),
        rank=value.rank,
        replica=value.replica,
        kind=value.kind,
        state=records.replica_state_to_proto(value.state),
        installed_version=value.installed_version,
        pending_version=value.pending_version,
        target_version=value.target_version,
        lag=value.lag,
        problem=None if value.problem is None else records.problem_to_proto(value.problem),
        timings=records.timings_to_proto(value.timings),
        num_bytes=value.num_bytes,
        transport=records.transport_to_proto(value.transport),
        choice_reason=value.choice_reason,
        leased_versions=value.leased_versions,
        num_ranks=value.num_ranks,
        endpoint=value.endpoint,
    )


def _attempt_status(value: c.AttemptStatus) -> admin.AttemptStatus:
    return admin.AttemptStatus(
        attempt_id=value.attempt_id,
        version=value.version,
        step=value.step,
        voted_ranks=value.voted_ranks,
        staged_ranks=value.staged_ranks,
        world_size=value.world_size,
    )
