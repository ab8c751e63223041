# Sets up the cluster's own network: a bridge that connects the nodes, and the client outside, x, on
# a network of its own. The control plane runs here, and this is everybody's router.
mount --make-rprivate /
mkdir -p /run/netns
mount -t tmpfs tmpfs /run/netns
ip link set lo up
echo 1 > /proc/sys/net/ipv4/ip_forward
echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad
ip link add br0 type bridge
ip addr add "$CONTROL4/24" dev br0
ip addr add "$CONTROL6/64" dev br0 nodad
ip link set br0 up

# connect NAME: a namespace with eth0. Its peer here has the name of the namespace.
connect() {
    ip netns add "$1"
    nsenter --net="/run/netns/$1" sh -c '
        echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad
        echo 0 > /proc/sys/net/ipv6/conf/default/accept_ra
        ip link set lo up'
    ip link add "$1" type veth peer name eth0 netns "$1"
    ip link set "$1" up
}
# address NAME IPV4/LENGTH GATEWAY IPV6/LENGTH GATEWAY
address() {
    nsenter --net="/run/netns/$1" ip -b - <<END
link set eth0 up
addr add $2 dev eth0
addr add $4 dev eth0 nodad
route add default via $3
route add default via $5
END
}
echo "$NODES" | while read -r name ip4 ip6 pods4 pods6 virtual4 virtual6; do
    connect "$name"
    ip link set "$name" master br0
    address "$name" "$ip4/24" "$CONTROL4" "$ip6/64" "$CONTROL6"
    ip route add "$virtual4" via "$ip4"
    ip -6 route add "$virtual6" via "$ip6"
    ip route add "$pods4" via "$ip4"
    ip -6 route add "$pods6" via "$ip6"
done
connect x
ip addr add 172.31.0.1/24 dev x
ip addr add fd00:172:31::1/64 dev x nodad
address x 172.31.0.2/24 172.31.0.1 fd00:172:31::2/64 fd00:172:31::1
