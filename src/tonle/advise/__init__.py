"""Which GPUs, how many, and in what form: sizing from data sheets, with reasons, checked in simulation (`tonle advise`).

Does: shapes of models, data sheets of GPUs, step times from both (`roofline.py`), options and limits, lines with reasons, the
check by the simulator. Does not: need torch or a device, fetch models, or know prices.

    question = Question(shape=find_model("llama-3.1-70b"), gpu=find_data_sheet("H100"), workload=Workload.of_spans(…), slo=slo)
    advice = advise(question)
"""
