"""AdminService: one consistent picture for operators. Bound by refitd.server.routes."""

from __future__ import annotations

from refitd.control import commands as c
from refitd.control.control import ControlPlane
from refitd.server import convert
from refitd.server.interceptors import Context
from refitd.v1 import admin_pb2 as pb


class AdminServicer:
    """One instance serves all calls, on the daemon's event loop."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    async def get_status(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        return convert.status_response(await self._control.status(c.GetStatusRequest(request.model)))
