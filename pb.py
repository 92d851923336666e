import sys; sys.path.insert(0,"/tmp/lab/see/trackers")
from wandb.proto import wandb_internal_pb2 as pb
for f in pb.Record.DESCRIPTOR.fields: print(f.number, f.name, end="; ")
print()
for n in ("FilesItem","FilesRecord"):
    print(n,[(f.number,f.name) for f in getattr(pb,n).DESCRIPTOR.fields])
