# Makes a node's file system: this machine's, read through an overlay, with folders of its own.
mount --make-rprivate /
hostname "$NODE"
scratch=$STATE/$NODE/scratch
mkdir -p "$scratch"
mount -t tmpfs -o mode=755 kpx-cluster "$scratch"
cd "$scratch"
mkdir upper work root
mount -t overlay overlay -o "lowerdir=/,upperdir=$scratch/upper,workdir=$scratch/work" root
cd root
mount -t proc proc proc
mount --rbind /dev dev
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mkdir -p ".$STATE" ".$PARTS"
mount --rbind "$STATE" ".$STATE"
mount --bind "$PARTS" ".$PARTS"
mkdir -p var/lib/containerd var/lib/kubelet var/log/pods opt/cni/bin
for folder in containerd kubelet; do
    mkdir -p "$STATE/$NODE/$folder"
    mount --bind "$STATE/$NODE/$folder" "var/lib/$folder"
done
mount -t sysfs sysfs sys
if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
    mount -t cgroup2 cgroup2 sys/fs/cgroup
    # A group with processes of its own passes no controllers on.
    mkdir sys/fs/cgroup/init
    while read -r process; do
        echo "$process" > sys/fs/cgroup/init/cgroup.procs || true
    done < sys/fs/cgroup/cgroup.procs
    for controller in $(cat sys/fs/cgroup/cgroup.controllers); do
        echo "+$controller" > sys/fs/cgroup/cgroup.subtree_control
    done
else
    mount -t tmpfs -o mode=755 tmpfs sys/fs/cgroup
    for hierarchy in /sys/fs/cgroup/*/; do
        name=$(basename "$hierarchy")
        # A second name of joined controllers.
        if [ -L "/sys/fs/cgroup/$name" ]; then
            cp -P "/sys/fs/cgroup/$name" "sys/fs/cgroup/$name"
            continue
        fi
        mkdir "sys/fs/cgroup/$name"
        case $name in
        unified) mount -t cgroup2 cgroup2 "sys/fs/cgroup/$name" ;;
        systemd) mount -t cgroup -o none,name=systemd cgroup "sys/fs/cgroup/$name" ;;
        *) mount -t cgroup -o "$name" cgroup "sys/fs/cgroup/$name" ;;
        esac
    done
fi
mount -t bpf -o mode=0700 bpf sys/fs/bpf
mkdir -p old
pivot_root . old
cd /
umount -l /old
mount --make-rshared /
mkdir -p /run/lock /run/netns
echo "$NODE" > /etc/hostname
rm -rf /etc/cni/net.d
mkdir -p /etc/cni/net.d /etc/kubernetes /opt/cni/bin
cp "$PARTS"/cni/* /opt/cni/bin/
cp "$CNI" /etc/cni/net.d/10-kpx-cluster.conflist
printf 'nameserver %s\n' "$CONTROL4" > /etc/resolv.conf
printf '127.0.0.1 localhost\n::1 localhost\n' > /etc/hosts
echo 1 > /proc/sys/net/ipv4/ip_forward
echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
echo "$NODES" | while read -r name ip4 ip6 pods4 pods6 _; do
    if [ "$name" != "$NODE" ]; then
        ip route replace "$pods4" via "$ip4"
        ip -6 route replace "$pods6" via "$ip6"
    fi
done
