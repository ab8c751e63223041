//! Lists sockets by the kernel's `sock_diag`, and aborts them.

use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};

use anyhow::{Context, Result, ensure};
use proxy_net::sock_diag::{Handle, connect};
use socket2::SockRef;
use testbed::netns::NetNs;

#[test]
fn a_connected_socket_is_listed_and_aborted() -> Result<()> {
    let ns = NetNs::create(format!("kpx-aborted-{}", std::process::id()))?;
    ns.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(async {
            let (connection, handle) = connect()?;
            tokio::select! {
                done = sockets(&handle) => done,
                () = connection => anyhow::bail!("the netlink socket has failed"),
            }
        })
    })
}

async fn sockets(handle: &Handle) -> Result<()> {
    let server = UdpSocket::bind("127.0.0.1:0")?;
    let at = server.local_addr()?;
    let by_v4 = UdpSocket::bind("127.0.0.1:0")?;
    by_v4.connect(at)?;
    let by_v6 = UdpSocket::bind("[::]:0")?;
    by_v6.connect(SocketAddr::new(
        Ipv4Addr::LOCALHOST.to_ipv6_mapped().into(),
        at.port(),
    ))?;
    for socket in [by_v4, by_v6] {
        let cookie = SockRef::from(&socket).cookie()?;
        let listed = handle.list().await?;
        let found = listed
            .iter()
            .find(|listed| listed.cookie() == cookie)
            .context("it is connected")?;
        ensure!(found.peer() == at, "{found:?}");
        ensure!(handle.abort(found).await?, "it was there");
        let error = socket.recv(&mut [0]).err().context("it is aborted")?;
        ensure!(error.kind() == ErrorKind::ConnectionAborted, "{error}");
        ensure!(!handle.abort(found).await?, "it is connected no longer");
    }
    let server = TcpListener::bind("127.0.0.1:0")?;
    let mut client = TcpStream::connect(server.local_addr()?)?;
    let local = client.local_addr()?;
    let peer = client.peer_addr()?;
    ensure!(
        !handle.abort_tcp(local, local).await?,
        "no socket has these ends"
    );
    ensure!(handle.abort_tcp(local, peer).await?, "it was there");
    let error = client.read(&mut [0]).err().context("it is aborted")?;
    ensure!(error.kind() == ErrorKind::ConnectionAborted, "{error}");
    Ok(())
}
