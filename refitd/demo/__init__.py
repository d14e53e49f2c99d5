"""`refitd demo`: a daemon, two training ranks and an engine on this machine, and what each version went through.

The orchestrator (`run`, `supervisor`, `view`) imports neither torch nor vLLM; the heavy parts are child processes,
which report with the lines of `events`. Started by refitd.cli.demo.
"""
