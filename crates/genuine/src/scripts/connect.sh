# connect NAME [WORD...]: a namespace with eth0, which ip-link gets the words for. Its peer here has the name of the
# namespace.
connect() {
    name=$1
    shift
    ip netns add "$name"
    nsenter --net="/run/netns/$name" sh -c '
        echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad
        echo 0 > /proc/sys/net/ipv6/conf/default/accept_ra
        ip link set lo up'
    ip link add "$name" type veth peer name eth0 "$@" netns "$name"
    ip link set "$name" up
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
# node NAME IPV4 IPV6: a node keeps its hardware address when it boots again.
node() {
    # shellcheck disable=SC2046 # Four words.
    connect "$1" address "$(printf '02:00:%02x:%02x:%02x:%02x' $(echo "$2" | tr . ' '))"
    ip link set "$1" master br0
    address "$1" "$2/24" "$CONTROL4" "$3/64" "$CONTROL6"
}
