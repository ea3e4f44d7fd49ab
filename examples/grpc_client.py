"""Plain gRPC against a local stack: stoker up && python examples/grpc_client.py."""

import sys

import grpc

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc

target = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7320"
with grpc.insecure_channel(target) as channel:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    model = stub.ListModels(inference_pb2.ListModelsRequest(), timeout=10).models[0].id
    request = inference_pb2.GenerateRequest(
        model=model,
        text="Why is a warm KV cache worth keeping?",
        sampling=inference_pb2.Sampling(max_tokens=32),
    )
    for response in stub.Generate(request, timeout=60):
        if response.HasField("started"):
            print(f"[{response.started.replica_id}, chosen by {response.started.reason}]")
        elif response.HasField("delta"):
            print(response.delta.text, end="", flush=True)
        else:
            usage = response.finished.usage
            cached = usage.cached_prompt_tokens if usage.HasField("cached_prompt_tokens") else "an unknown number"
            print(f"\n[{usage.prompt_tokens} prompt tokens, {cached} of them cached]")
