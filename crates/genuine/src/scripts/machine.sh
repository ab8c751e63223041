# Sets up the cluster's own network: a bridge that connects the nodes, and the client outside, x, on
# a network of its own. The control plane runs here, and this is everybody's router.
mount --make-rprivate /
mkdir -p /run/netns
mount -t tmpfs tmpfs /run/netns
ip link set lo up
echo 1 > /proc/sys/net/ipv4/ip_forward
echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad
# Without an address of its own a bridge takes one of its ports', and another after a node has booted.
ip link add br0 address 02:00:ac:1e:00:01 type bridge
ip addr add "$CONTROL4/24" dev br0
ip addr add "$CONTROL6/64" dev br0 nodad
ip link set br0 up
echo "$NODES" | while read -r name ip4 ip6 pods4 pods6 virtual4 virtual6; do
    node "$name" "$ip4" "$ip6"
    ip route add "$virtual4" via "$ip4"
    ip -6 route add "$virtual6" via "$ip6"
    ip route add "$pods4" via "$ip4"
    ip -6 route add "$pods6" via "$ip6"
done
connect x
ip addr add 172.31.0.1/24 dev x
ip addr add fd00:172:31::1/64 dev x nodad
address x 172.31.0.2/24 172.31.0.1 fd00:172:31::2/64 fd00:172:31::1
