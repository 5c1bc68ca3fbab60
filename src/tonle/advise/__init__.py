"""Which GPUs, how many, and in what form: sizing from data sheets, with reasons (`tonle advise`)."""
