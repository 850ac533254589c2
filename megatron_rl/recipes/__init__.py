"""Recipes: tasks that people train, as folders of files that a user copies and keeps.

`megatron-rl new DIR --recipe NAME` (new.py) copies a folder and fills in a layout; prepare.py has
what the scripts prepare.py of the folders share.  To add a recipe, add a folder here with

    README.md    first line "# NAME: what is learned" (--list shows it); its first code block has
                 the next commands, which `new` prints
    config.toml  complete for one node of 8 H100 and Qwen3-30B-A3B; a comment line "# Layout: ..."
    prepare.py   writes the prompt files that config.toml names
    run.sh       starts the run; passes its options on; variables GPUS, NNODES
    reward.py    (or agent.py) named in config.toml as "reward:FUNCTION"

and no __init__.py: the folders are data, not packages.  tests/unit/recipes checks every folder.
"""
