"""OpenAI's Responses API (`/v1/responses`), as a translation into chat completions and back.

Does: read a request (`request.py`, `input_items.py`, `function_tools.py`) into a chat body, write the reply (`output.py`,
`reply.py`), and keep responses for `previous_response_id` and for reading them again (`response_store.py`). Does not: answer;
the pipeline does, as for chat.

    api.py      the handlers, and what they share
    call.py     one POST /v1/responses on its way through the pipeline
"""
