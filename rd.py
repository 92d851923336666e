import sys, collections, struct
sys.path.insert(0,"/tmp/lab/see/trackers")
from wandb.proto import wandb_internal_pb2 as pb
data=open(sys.argv[1],"rb").read()
print(data[:7])
pos=7; out=[]; cur=b""
while pos+7<=len(data):
    left=32768-pos%32768
    if left<7: pos+=left; continue
    crc,n,t=struct.unpack("<IHB",data[pos:pos+7]); pos+=7
    cur+=data[pos:pos+n]; pos+=n
    if t in (1,4): out.append(cur); cur=b""
c=collections.Counter(); 
for o in out:
    r=pb.Record(); r.ParseFromString(o); c[r.WhichOneof("record_type")]+=1
    if r.WhichOneof("record_type") in ("files","telemetry"): print(str(r)[:300])
print(c)
