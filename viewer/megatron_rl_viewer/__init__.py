"""`megatron-rl view`: a local web server that shows runs, and each token of their rollouts.

Reads only what a run wrote (docs/reference/token_data.md) and changes nothing in it.  Imports no
torch: it starts in a second.
    commands.py    the commands view and report (view_command.py: options, the printed address,
                   uvicorn; report_command.py)
    app.py         HTTP routes and access
    run_folder.py  one run folder: what it holds and what is wrong with it
    metrics.py     its metrics.jsonl and events.jsonl, followed while they are written
    index.py       its rollouts in an SQLite file, followed likewise; query.py: tables of it
    token_data.py  one rollout, token by token; pieces.py: the text of each token
    expert_loads.py loads, flips and margins of a range of steps
    disk_copy.py   a copy of chosen rollouts that opens from disk
    static/        the page, built from viewer/web (make viewer)
    report.py      report.html of a run, figure.py: its pictures; the trainer writes it at the end
                   of a run
"""

__version__ = "0.3.0"
