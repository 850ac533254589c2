"""TEMPORARY until the metrics helper's version lands."""
import torch, torch.distributed as dist
class MetricSums:
    def __init__(self): self.s={}; self.m={}
    def add(self,name,value,count=1.0):
        a=self.s.setdefault(name,[0.0,0.0]); a[0]=a[0]+value; a[1]=a[1]+count
    def add_max(self,name,value):
        self.m[name]=max(float(value),self.m.get(name,-1e30))
    def reduce(self,group,device):
        mine=({k:(float(v),float(c)) for k,(v,c) in self.s.items()},self.m)
        out=[None]*dist.get_world_size(); dist.all_gather_object(out,mine)
        r={}
        for s,_ in out:
            for k,(v,c) in s.items():
                a=r.setdefault(k,[0,0]); a[0]+=v; a[1]+=c
        d={k:v/c if c else 0.0 for k,(v,c) in r.items()}
        for _,m in out:
            for k,v in m.items(): d[k]=max(v,d.get(k,-1e30))
        return d
