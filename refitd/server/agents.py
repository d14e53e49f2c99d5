"""AgentService: registrations, leases and what replicas report. Parse, call the control plane, reply.

Bound by refitd.server.routes.
"""

from __future__ import annotations

from refitd.control import commands as c
from refitd.control.control import ControlPlane
from refitd.rpc import convert as records
from refitd.server import convert
from refitd.server.interceptors import Context
from refitd.v1 import agents_pb2 as pb


class AgentServicer:
    """One instance serves all calls, on the daemon's event loop."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    async def register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        answer = await self._control.register(convert.register_request(request))
        return pb.RegisterResponse(
            header=convert.header(answer.header),
            agent_id=answer.agent_id,
            ttl=records.duration_to_proto(answer.ttl),
            target_version=answer.target_version,
        )

    async def deregister(self, request: pb.DeregisterRequest, context: Context) -> pb.DeregisterResponse:
        answer = await self._control.deregister(c.DeregisterRequest(request.agent_id))
        return pb.DeregisterResponse(header=convert.header(answer.header))

    async def acquire_lease(self, request: pb.AcquireLeaseRequest, context: Context) -> pb.AcquireLeaseResponse:
        answer = await self._control.acquire_lease(
            c.AcquireLeaseRequest(request.agent_id, request.model, request.version, request.lease_id)
        )
        return pb.AcquireLeaseResponse(
            header=convert.header(answer.header),
            lease_id=answer.lease_id,
            version=answer.version,
            pinned=answer.pinned,
        )

    async def release_lease(self, request: pb.ReleaseLeaseRequest, context: Context) -> pb.ReleaseLeaseResponse:
        answer = await self._control.release_lease(c.ReleaseLeaseRequest(request.lease_id))
        return pb.ReleaseLeaseResponse(header=convert.header(answer.header))

    async def report_replica(self, request: pb.ReportReplicaRequest, context: Context) -> pb.ReportReplicaResponse:
        answer = await self._control.report_replica(convert.report_replica_request(request))
        return pb.ReportReplicaResponse(header=convert.header(answer.header), target_version=answer.target_version)
