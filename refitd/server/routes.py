"""Binds servicers to the services of the protos.

Done here, and not by the generated add_..._to_server, because Watch yields bytes that are already encoded, which the
generated binding cannot take; and so that a method without an implementation fails at start. Called by
refitd.server.app.
"""

from __future__ import annotations

import re
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from refitd.v1 import admin_pb2, agents_pb2, fences_pb2, versions_pb2

VERSION_SERVICE: ServiceDescriptor = versions_pb2.DESCRIPTOR.services_by_name["VersionService"]
AGENT_SERVICE: ServiceDescriptor = agents_pb2.DESCRIPTOR.services_by_name["AgentService"]
FENCE_SERVICE: ServiceDescriptor = fences_pb2.DESCRIPTOR.services_by_name["FenceService"]
ADMIN_SERVICE: ServiceDescriptor = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]


def service_routes(service: ServiceDescriptor, servicer: object) -> grpc.GenericRpcHandler:
    """One handler per method of `service`: its name in snake case on `servicer`. Streams yield encoded responses.

    Raises AttributeError if the servicer lacks a method.
    """
    handlers: dict[str, Any] = {method.name: _route(method, servicer) for method in service.methods}
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _route(method: MethodDescriptor, servicer: object) -> Any:
    behavior = getattr(servicer, re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower())
    parse = GetMessageClass(method.input_type).FromString
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(behavior, parse, _already_encoded)
    serialize = GetMessageClass(method.output_type).SerializeToString
    return grpc.unary_unary_rpc_method_handler(behavior, parse, serialize)


def _already_encoded(response: bytes) -> bytes:
    return response
