"""`megatron-rl view`: a local web server that shows runs, and each token of their rollouts.

It reads only what a run wrote (docs/reference/token_data.md) and changes nothing in it.  It imports
no torch, so that it starts in a second.
    commands.py    the commands view and report (view_command.py: options, the printed address,
                   uvicorn; report_command.py)
    app.py         HTTP routes and access
    run_folder.py  one run folder: what it holds and what is wrong with it
    metrics.py     its metrics.jsonl and events.jsonl, followed while they are written
    index.py       its rollouts in an SQLite file, followed likewise; index_schema.py: the tables,
                   index_rows.py: their rows, query.py: pages of them
    prompts.py     one prompt, step by step, and the prompts that several runs have
    token_data.py  one rollout, token by token; pieces.py: the text of each token
    expert_loads.py loads, flips and margins of a range of steps
    disk_copy.py   a copy of chosen rollouts that opens from disk
    static/        the page, built from viewer/web (make viewer)
    report.py      report.html of a run, which the trainer writes at the end; figure.py: its
                   pictures
"""

__version__ = "0.3.0"
