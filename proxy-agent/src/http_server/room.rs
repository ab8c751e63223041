//! The connection limit. At the limit, the client with the most connections loses one.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::sys::resource::{Resource, getrlimit};
use proxy_common::addr::{Addr, Addr6};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

/// The maximum number of connections of a listener, and of all listeners that share a limit. If the
/// process may open few files, these limits are a sixteenth and a quarter of its file limit.
const OF_LISTENER: usize = 256;
const IN_SUM: usize = 1_024;

/// The connection limit that listeners share.
#[derive(Clone, Debug)]
pub(crate) struct Room {
    of_listener: usize,
    in_sum: Arc<Semaphore>,
    open: Arc<Mutex<Open>>,
}

/// One listener's share of the limit.
#[derive(Debug)]
pub(crate) struct Place {
    room: Room,
    listener: usize,
    free: Arc<Semaphore>,
}

/// The permits of an open connection: its listener's, and the shared one.
pub(super) type Permits = [OwnedSemaphorePermit; 2];

#[derive(Debug, Default)]
struct Open {
    listeners: usize,
    /// The connections, the oldest first.
    connections: VecDeque<Connection>,
}

#[derive(Debug)]
struct Connection {
    listener: usize,
    /// The client's address; `None` at the Unix socket.
    client: Option<IpAddr>,
    task: AbortHandle,
}

impl Default for Room {
    fn default() -> Self {
        let files = files();
        Self::new(OF_LISTENER.min(files / 16), IN_SUM.min(files / 4))
    }
}

impl Room {
    fn new(of_listener: usize, in_sum: usize) -> Self {
        Self {
            of_listener,
            in_sum: Arc::new(Semaphore::new(in_sum)),
            open: Arc::default(),
        }
    }

    pub(crate) fn place(&self) -> Place {
        let mut open = self.lock();
        open.listeners += 1;
        Place {
            room: self.clone(),
            listener: open.listeners,
            free: Arc::new(Semaphore::new(self.of_listener)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Admits a connection, which keeps its permits while open.
    pub(super) async fn admit(
        &self,
        client: Option<IpAddr>,
        begin: impl FnOnce(Permits) -> AbortHandle,
    ) {
        let of_listener = |connection: &Connection| connection.listener == self.listener;
        let permits = [
            self.permit(&self.free, of_listener).await,
            self.permit(&self.room.in_sum, |_| true).await,
        ];
        let connection = Connection {
            listener: self.listener,
            client,
            task: begin(permits),
        };
        self.room.lock().connections.push_back(connection);
    }

    /// Returns a permit, if necessary by ending one of these connections. On a busy machine an
    /// aborted task lives on for a while, with its connection open.
    async fn permit(
        &self,
        free: &Arc<Semaphore>,
        among: impl Fn(&Connection) -> bool,
    ) -> OwnedSemaphorePermit {
        if let Ok(permit) = Arc::clone(free).try_acquire_owned() {
            return permit;
        }
        self.room.lock().end_one(among);
        Arc::clone(free)
            .acquire_owned()
            .await
            .expect("nothing closes the semaphore")
    }
}

impl Open {
    fn end_one(&mut self, among: impl Fn(&Connection) -> bool) {
        self.connections
            .retain(|connection| !connection.task.is_finished());
        if let Some(connection) = self
            .gives_way(among)
            .and_then(|index| self.connections.remove(index))
        {
            connection.task.abort();
        }
    }

    /// Returns the index of the oldest connection of the client with the most connections. By age
    /// alone, one client could end all other connections before their requests.
    fn gives_way(&self, among: impl Fn(&Connection) -> bool) -> Option<usize> {
        let mut of_site = HashMap::<_, usize>::new();
        let mut of_client = HashMap::<_, usize>::new();
        let among = || {
            self.connections
                .iter()
                .enumerate()
                .filter(|(_, connection)| among(connection))
        };
        for (_, Connection { client, .. }) in among() {
            *of_site.entry(client.map(site)).or_default() += 1;
            *of_client.entry(client).or_default() += 1;
        }
        // `max_by_key` returns the last maximum.
        let heaviest = among().rev().max_by_key(|(_, Connection { client, .. })| {
            (of_site[&client.map(site)], of_client[client])
        });
        heaviest.map(|(index, _)| index)
    }
}

/// Returns the address that identifies a site. In IPv6 this is the /64, because a host may have any
/// address in it.
fn site(client: IpAddr) -> IpAddr {
    match client.to_canonical() {
        IpAddr::V4(client) => client.into(),
        IpAddr::V6(client) => Addr6::from(client).site_if(true).ip(),
    }
}

/// Returns this process's hard limit on open files.
pub(crate) fn files() -> usize {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(1_024, |(_, hard)| {
        usize::try_from(hard).unwrap_or(usize::MAX)
    })
}

#[cfg(test)]
mod tests {
    use tokio::task::{JoinHandle, yield_now};

    use super::*;

    const GREEDY: &str = "10.244.1.2";
    const PROBER: &str = "192.0.2.1";

    /// Admits a connection that never ends, and returns its task.
    async fn connect(place: &Place, client: &str) -> JoinHandle<()> {
        let client = client.parse().unwrap();
        let mut task = None;
        let begin = |permits: Permits| {
            let connection = tokio::spawn(async move {
                let _permits = permits;
                std::future::pending().await
            });
            task.insert(connection).abort_handle()
        };
        place.admit(Some(client), begin).await;
        task.unwrap()
    }

    async fn connect_each<'a>(
        connections: impl IntoIterator<Item = (&'a Place, String)>,
    ) -> Vec<JoinHandle<()>> {
        let mut connected = Vec::new();
        for (place, client) in connections {
            connected.push(connect(place, &client).await);
        }
        connected
    }

    async fn ended(connections: &[JoinHandle<()>]) -> Vec<usize> {
        yield_now().await;
        (0..connections.len())
            .filter(|index| connections[*index].is_finished())
            .collect()
    }

    #[tokio::test]
    async fn client_with_most_connections_gives_way_and_its_oldest_first() {
        for (greedy, prober) in [
            (GREEDY, PROBER),
            ("fd00::2", "fd00:0:0:1::2"),
            ("::ffff:10.244.1.2", "10.244.1.3"),
        ] {
            let place = Room::new(8, 100).place();
            let probe = connect(&place, prober).await;
            let connections = connect_each((0..30).map(|_| (&place, greedy.to_owned()))).await;
            assert_eq!(ended(&connections).await, (0..23).collect::<Vec<_>>());
            assert!(!probe.is_finished());
        }
    }

    /// A host with an IPv6 address has 2^64 addresses.
    #[tokio::test]
    async fn client_with_many_addresses_of_ipv6_counts_as_one() {
        let place = Room::new(8, 100).place();
        let probes = [connect(&place, PROBER).await, connect(&place, PROBER).await];
        let connections =
            connect_each((0..30).map(|nth| (&place, format!("2001:db8::{nth:x}")))).await;
        assert_eq!(ended(&connections).await, (0..24).collect::<Vec<_>>());
        assert!(ended(&probes).await.is_empty());
    }

    #[tokio::test]
    async fn clients_with_equally_many_connections_give_way_by_age() {
        let place = Room::new(4, 100).place();
        let connections =
            connect_each((1..=6).map(|nth| (&place, format!("10.244.1.{nth}")))).await;
        assert_eq!(ended(&connections).await, [0, 1]);
    }

    /// Each listener alone could hold all connections.
    #[tokio::test]
    async fn listeners_that_share_a_room_hold_no_more_in_sum() {
        let room = Room::new(8, 10);
        let [mine, others @ ..] = [(); 5].map(|()| room.place());
        let probe = connect(&mine, PROBER).await;
        let connections =
            connect_each((0..40).map(|nth| (&others[nth % 4], GREEDY.to_owned()))).await;
        assert_eq!(ended(&connections).await, (0..31).collect::<Vec<_>>());
        assert!(!probe.is_finished());
    }

    /// A load at one listener's port ends no connection of another listener.
    #[tokio::test]
    async fn listener_that_is_full_ends_its_own_connections() {
        let room = Room::new(4, 100);
        let [mine, full] = [(); 2].map(|()| room.place());
        let elsewhere = connect_each((0..4).map(|_| (&mine, GREEDY.to_owned()))).await;
        let connections = connect_each((0..6).map(|_| (&full, GREEDY.to_owned()))).await;
        assert_eq!(
            (ended(&connections).await, ended(&elsewhere).await),
            (vec![0, 1], vec![])
        );
    }

    #[tokio::test]
    async fn connection_that_has_ended_leaves_its_room() {
        let place = Room::new(2, 2).place();
        let connections = [connect(&place, PROBER).await, connect(&place, PROBER).await];
        connections[1].abort();
        yield_now().await;
        let _new = connect(&place, GREEDY).await;
        assert_eq!(ended(&connections).await, [1]);
    }
}
