"""megatron-core's torch_dist format, read and written by this package.

shard_writer     writes the state of a run, with core's plan, by threads of each rank
optimizer_parts  the distributed optimizer's state as parts of parameters, without a gather
metadata_pieces  puts `.metadata` together from what each rank has pickled
safe_checkpoint  loads a checkpoint into a sharded state dict without unpickling code
metadata         reads `.metadata`, admitting only the classes of the format
chunks           the chunks of which a checkpoint consists, and their bytes in a file
chunk_writer     writes the model part, one parameter at a time (`megatron-rl convert`)
chunk_reader     reads parameters, row by row where the file allows it

tests/te and tests/dist prove the format against megatron-core itself: what core saves is read here,
and what is written here loads with core.
"""
