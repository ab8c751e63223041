# Starts a node's first process in namespaces of its own: enter.sh NODE PROGRAM PLAN
node=$1 program=$2 plan=$3
# A control group of its own in each hierarchy. The group becomes the root that the node sees.
join() {
    mkdir -p "$1/kpx-cluster/$node"
    echo $$ > "$1/kpx-cluster/$node/cgroup.procs"
}
if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
    join /sys/fs/cgroup
else
    for hierarchy in /sys/fs/cgroup/*/; do
        if [ -f "$hierarchy/cgroup.clone_children" ] && [ -f "$hierarchy/cpuset.cpus" ]; then
            echo 1 > "$hierarchy/cgroup.clone_children"
        fi
        if [ -f "$hierarchy/cgroup.procs" ]; then
            join "$hierarchy"
        fi
    done
fi
exec nsenter --net="/run/netns/$node" \
    unshare --fork --kill-child --pid --mount --uts --ipc --cgroup -- "$program" init "$plan"
