"""The router: OpenAI-style HTTP on one side, sessions with workers on the other. Never imports torch.

::

    app ─ routes, errors, disconnects          text: chat_template tokenizer detokenizer stop_strings
     │ parse: JSON → GenerationRequest                        (token ids only beyond this point)
     │ answer: choices → chunks or one body    sse, openai_response
     ▼
    generation ─ one sequence: reserve → prefill → merge → tokens, again elsewhere when a worker is lost
     │ merge (pure)   policy (pure)   admission: waiting for room
     ▼
    workers ─ worker_client: one Session per worker

No state that must be shared: any number of routers may run side by side.
"""
