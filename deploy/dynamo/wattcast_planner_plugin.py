"""A plug-in of NVIDIA Dynamo's planner that keeps a power budget by predicted watts.

It serves the stage CONSTRAIN: of the replicas that the planner has settled on it allows at most as
many as keep the budget at the traffic that is observed or predicted. The protobuf and its gRPC stubs
are those of the planner's own wheel:

    pip install wattcast ai-dynamo grpcio
    python deploy/dynamo/wattcast_planner_plugin.py --model llama3-8b --gpu h200 --power 4kW \\
        --listen 127.0.0.1:7790 --gateway 127.0.0.1:7777 --token "$TOKEN"

Decode replicas (and those of engines that do both phases, which Dynamo calls decode too) are bounded.
Of prefill replicas it has no opinion. Without traffic, or where the answer cannot be predicted, it
accepts what is proposed and says why in its log."""

from __future__ import annotations

import argparse
import logging
import signal
import threading
from concurrent import futures
from typing import Any

from wattcast.control.planner_power import PlannedTraffic, ReplicaPower
from wattcast.core import units
from wattcast.core.errors import WattcastError
from wattcast.predictor.api import find_gpu

PLUGIN = "wattcast-power"
PROTOCOL = "1.0"
DECODE = "decode"
HEARTBEAT_S = 5.0
LOG = logging.getLogger(PLUGIN)


def read_traffic(context: Any) -> PlannedTraffic | None:
    """Return the traffic that is predicted for the next interval, else what was observed last."""
    if not context.HasField("observations") or not context.observations.HasField("traffic"):
        return None
    seen = context.observations.traffic
    if seen.duration_s <= 0:
        return None
    requests, prompt, output = seen.num_req, seen.isl, seen.osl
    if context.HasField("predictions"):
        predicted = context.predictions
        if predicted.HasField("predicted_num_req"):
            requests = predicted.predicted_num_req
        if predicted.HasField("predicted_isl"):
            prompt = predicted.predicted_isl
        if predicted.HasField("predicted_osl"):
            output = predicted.predicted_osl
    if not (requests > 0 and prompt >= 1 and output >= 1):
        return None
    return PlannedTraffic(requests / seen.duration_s, round(prompt), round(output))


def find_proposed(context: Any) -> int | None:
    """Return how many decode replicas are proposed; None where nobody says."""
    if not context.HasField("proposal"):
        return None
    for target in context.proposal.targets:
        if target.sub_component_type == DECODE and target.HasField("replicas"):
            return int(target.replicas)
    return None


def constrain(
    messages: Any,
    request: Any,
    power: ReplicaPower,
    budget_w: float,
) -> Any:
    """Return the answer to a ``ConstrainStageRequest``; ``messages`` is the module of the protobuf."""
    response = messages.ConstrainStageResponse()
    traffic = read_traffic(request.context)
    proposed = find_proposed(request.context)
    if traffic is None or proposed is None:
        LOG.info("accepted: no traffic, or no decode replicas proposed")
        response.accept.SetInParent()
        return response
    try:
        most, watts = power.count_most_replicas(traffic, budget_w, proposed)
    except WattcastError as error:
        LOG.warning("accepted: %s", error)
        response.accept.SetInParent()
        return response
    response.override.reason = (
        f"{most} of {proposed} decode replicas draw {watts:.0f} W as predicted, of {budget_w:.0f} W"
    )
    target = response.override.targets.add()
    target.sub_component_type = DECODE
    target.replicas = most
    target.type = messages.AT_MOST
    LOG.info("%s", response.override.reason)
    return response


def main() -> None:
    """Serve until a signal comes; register with the planner where its gateway is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of a replica")
    parser.add_argument("--power", required=True, help="budget of all decode replicas: 4kW")
    parser.add_argument("--listen", default="127.0.0.1:7790")
    parser.add_argument("--gateway", default="", help="host:port of the planner's registry")
    parser.add_argument("--token", default="")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)

    try:
        budget_w = units.parse_amount(options.power, "W", "--power", inclusive=False)
        power = ReplicaPower.predict(options.model, find_gpu(options.gpu), options.tp)
    except WattcastError as error:
        parser.exit(2, f"{error}\n")
    try:
        import grpc
        from dynamo.planner.plugins.proto.v1 import plugin_pb2 as messages
        from dynamo.planner.plugins.proto.v1 import plugin_pb2_grpc as services
    except ModuleNotFoundError as error:
        parser.exit(4, f"the plug-in needs {error.name}: pip install ai-dynamo grpcio\n")

    class PowerPlugin(services.ConstrainPluginServicer):
        def Constrain(self, request: Any, context: Any) -> Any:
            return constrain(messages, request, power, budget_w)

    server = grpc.server(futures.ThreadPoolExecutor(1))
    services.add_ConstrainPluginServicer_to_server(PowerPlugin(), server)
    server.add_insecure_port(options.listen)
    server.start()
    print(f"LISTEN_READY grpc://{options.listen}", flush=True)

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if options.gateway:
        with grpc.insecure_channel(options.gateway) as channel:
            registry = services.PluginRegistryStub(channel)
            answer = registry.Register(
                messages.RegisterRequest(
                    plugin_id=PLUGIN,
                    plugin_type="constrain",
                    priority=5,
                    endpoint=f"grpc://{options.listen}",
                    version=PROTOCOL,
                    protocol_version=PROTOCOL,
                    auth_token=options.token,
                    hold_policy=messages.HOLD_LAST,
                    needs=["observations.traffic", "predictions", "proposal"],
                )
            )
            if not answer.accepted:
                raise SystemExit(f"the planner refuses the plug-in: {answer.reject_reason}")
            while not stop.wait(HEARTBEAT_S):
                beat = messages.HeartbeatRequest(plugin_id=PLUGIN, auth_token=options.token)
                registry.Heartbeat(beat)
    stop.wait()
    server.stop(1.0)


if __name__ == "__main__":
    main()
