"""FenceService: parse, call the control plane, reply. No decision is taken here. Bound by refitd.server.routes."""

from __future__ import annotations

from refitd.control import fence_commands as f
from refitd.control.control import ControlPlane
from refitd.rpc import convert as records
from refitd.rpc import convert_fences as fences
from refitd.server.convert import header
from refitd.server.interceptors import Context
from refitd.v1 import fences_pb2 as pb


class FenceServicer:
    """One instance serves all calls, on the daemon's event loop."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    async def report_fences(self, request: pb.ReportFencesRequest, context: Context) -> pb.ReportFencesResponse:
        answer = await self._control.report_fences(
            f.ReportFencesRequest(
                agent_id=request.agent_id,
                incarnation=request.incarnation,
                sequence=request.sequence,
                holders=tuple(fences.holder_from_proto(holder) for holder in request.holders),
                waits=tuple(fences.wait_from_proto(wait) for wait in request.waits),
                ended=tuple(fences.end_from_proto(end) for end in request.ended),
                waited=tuple(fences.waited_from_proto(waited) for waited in request.waited),
                rejections=max(request.rejections, 0),
                dropped=max(request.dropped, 0),
            )
        )
        broken = [fences.break_to_proto(entry) for entry in answer.broken]
        return pb.ReportFencesResponse(header=header(answer.header), broken=broken)

    async def list_fences(self, request: pb.ListFencesRequest, context: Context) -> pb.ListFencesResponse:
        answer = await self._control.list_fences(f.ListFencesRequest(request.model))
        return pb.ListFencesResponse(
            header=header(answer.header),
            agents=[
                pb.AgentFences(
                    agent_id=agent.agent_id,
                    model=agent.model,
                    rank=agent.rank,
                    host=agent.host,
                    incarnation=agent.incarnation,
                    reported_at=records.timestamp_to_proto(agent.reported_at),
                    holders=[fences.holder_to_proto(holder) for holder in agent.holders],
                    waits=[fences.wait_to_proto(wait) for wait in agent.waits],
                    ended=[fences.end_to_proto(end) for end in agent.ended],
                )
                for agent in answer.agents
            ],
            breaks=[fences.break_to_proto(entry) for entry in answer.breaks],
        )

    async def break_fence(self, request: pb.BreakFenceRequest, context: Context) -> pb.BreakFenceResponse:
        token = records.token_from_proto(request.token) if request.HasField("token") else None
        answer = await self._control.break_fence(
            f.BreakFenceRequest(request.domain, request.reason, request.by, token, request.request_id)
        )
        broken = [fences.break_to_proto(entry) for entry in answer.broken]
        return pb.BreakFenceResponse(header=header(answer.header), broken=broken)

    async def record_checkpoint(
        self, request: pb.RecordCheckpointRequest, context: Context
    ) -> pb.RecordCheckpointResponse:
        tokens = tuple(records.token_from_proto(token) for token in request.tokens)
        answer = await self._control.record_checkpoint(
            f.RecordCheckpointRequest(fences.checkpoint_from_proto(request.record), tokens)
        )
        return pb.RecordCheckpointResponse(
            header=header(answer.header), record=fences.checkpoint_to_proto(answer.record)
        )

    async def list_checkpoints(
        self, request: pb.ListCheckpointsRequest, context: Context
    ) -> pb.ListCheckpointsResponse:
        answer = await self._control.list_checkpoints(
            f.ListCheckpointsRequest(
                request.model, request.digest, request.path, request.version, request.page_size, request.page_token
            )
        )
        return pb.ListCheckpointsResponse(
            header=header(answer.header),
            records=[fences.checkpoint_to_proto(record) for record in answer.records],
            next_page_token=answer.next_page_token,
        )
