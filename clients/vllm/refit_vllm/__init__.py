"""vLLM engines as replicas of a published model: `LLM(path, **engine_args())`, then `attach(llm, model=...)`."""

from refit_vllm.replica import Replica, attach, engine_args

__all__ = ["Replica", "attach", "engine_args"]
