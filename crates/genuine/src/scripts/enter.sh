# Starts a node's first process in namespaces of its own: enter.sh NODE PROGRAM PLAN
node=$1 program=$2 plan=$3
# A control group of its own in each hierarchy. The group becomes the root that the node sees.
join() {
    mkdir -p "$1/kpx-cluster/$node"
    echo $$ > "$1/kpx-cluster/$node/cgroup.procs"
}
if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
    mkdir -p /sys/fs/cgroup/kpx-cluster
    for group in /sys/fs/cgroup /sys/fs/cgroup/kpx-cluster; do
        for controller in $(cat "$group/cgroup.controllers"); do
            echo "+$controller" > "$group/cgroup.subtree_control"
        done
    done
    join /sys/fs/cgroup
else
    for hierarchy in /sys/fs/cgroup/*/; do
        # A group without processors takes no process.
        if [ -f "$hierarchy/cpuset.cpus" ]; then
            mkdir -p "$hierarchy/kpx-cluster"
            for file in cpuset.cpus cpuset.mems; do
                cat "$hierarchy/$file" > "$hierarchy/kpx-cluster/$file"
            done
            echo 1 > "$hierarchy/kpx-cluster/cgroup.clone_children"
        fi
        if [ -f "$hierarchy/cgroup.procs" ]; then
            join "$hierarchy"
        fi
    done
fi
exec nsenter --net="/run/netns/$node" \
    unshare --fork --kill-child --pid --mount --uts --ipc --cgroup -- "$program" init "$plan"
