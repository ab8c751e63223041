//! The combinations to measure.

use super::{Mode, Path, Variant};

/// A row of the table of cells.
struct Plan {
    paths: &'static [Path],
    services: &'static [usize],
    modes: &'static [Mode],
    variants: &'static [Variant],
}

/// The number of Services of the first table.
pub const MANY_SERVICES: usize = 10_000;
/// More than any cluster has.
const MOST_SERVICES: usize = 100_000;

const USUAL: [Mode; 4] = [Mode::TcpCrr, Mode::TcpRr, Mode::TcpStream, Mode::UdpRr];
const YOUNG: [Mode; 2] = [Mode::TcpRrYoung, Mode::UdpRrYoung];
const NEAR: [Mode; 3] = [Mode::TcpCrr, Mode::TcpRr, Mode::TcpStream];
const MORE: [Mode; 4] = [Mode::UdpStream, Mode::UdpPps, Mode::UdpDns, Mode::TcpMany];
const OF_TABLE: [Variant; 5] = [Direct, Control, Nftables, Kpx, KpxOff];

use Variant::{
    Control, Direct, IptablesLegacy, IptablesNft, Kpx, KpxB, KpxOff, KpxSocketAll,
    KubeProxyIptables, KubeProxyNftables, Nftables,
};

/// The paths with kube-proxy itself.
const OF_KUBE_PROXY: [Path; 2] = [Path::Local, Path::Routable];
/// The paths of the first table.
const OF_NODES: [Path; 8] = [
    Path::Local,
    Path::Routable,
    Path::Calico,
    Path::KubeRouter,
    Path::Remote,
    Path::Host,
    Path::Outside,
    Path::OutsideRemote,
];

const fn plan(
    paths: &'static [Path],
    services: &'static [usize],
    modes: &'static [Mode],
    variants: &'static [Variant],
) -> Plan {
    Plan {
        paths,
        services,
        modes,
        variants,
    }
}

/// The cells of the first table.
const QUICK: [Plan; 3] = [
    plan(&OF_NODES, &[MANY_SERVICES], &USUAL, &OF_TABLE),
    plan(&OF_NODES, &[MANY_SERVICES], &YOUNG, &OF_TABLE),
    plan(&[Path::Local], &[MANY_SERVICES], &USUAL, &[KpxSocketAll]),
];

/// The remaining cells. Every variant is compared with [`Variant::Direct`] of the same row, round
/// by round.
const REST: [Plan; 7] = [
    plan(&OF_NODES, &[1], &USUAL, &OF_TABLE),
    plan(
        &OF_NODES,
        &[MANY_SERVICES],
        &USUAL,
        &[IptablesLegacy, IptablesNft],
    ),
    plan(
        &OF_KUBE_PROXY,
        &[MANY_SERVICES],
        &USUAL,
        &[KubeProxyIptables, KubeProxyNftables],
    ),
    plan(&[Path::Local], &[MANY_SERVICES], &MORE, &OF_TABLE),
    plan(&[Path::Overlay], &[MANY_SERVICES], &NEAR, &OF_TABLE),
    plan(
        &[Path::Local],
        &[50_000],
        &NEAR,
        &[Direct, Control, Nftables, Kpx],
    ),
    plan(
        &[Path::Local, Path::Outside],
        &[MOST_SERVICES],
        &USUAL,
        &[Direct, Control, Kpx],
    ),
];

/// The selected combinations; an empty list selects all.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Selects only the cells of [`QUICK`], the first table of results.
    pub is_quick: bool,
    pub services: Vec<usize>,
    pub paths: Vec<Path>,
    pub modes: Vec<Mode>,
    pub variants: Vec<Variant>,
}

impl Selection {
    pub fn services(&self) -> Vec<usize> {
        let mut services: Vec<_> = self.all().flat_map(|plan| plan.services).copied().collect();
        services.retain(|count| wanted(&self.services, count));
        services.sort_unstable();
        services.dedup();
        services
    }

    pub fn paths(&self, services: usize) -> impl Iterator<Item = Path> {
        Path::ALL
            .into_iter()
            .filter(move |path| !self.modes(services, *path).is_empty())
    }

    /// Returns the modes in their order, deduplicated.
    pub fn modes(&self, services: usize, path: Path) -> Vec<Mode> {
        let modes = self
            .plans(services, path)
            .flat_map(|plan| plan.modes)
            .copied();
        let mut modes: Vec<_> = modes
            .filter(|mode| wanted(&self.paths, &path) && wanted(&self.modes, mode))
            .collect();
        modes.sort_unstable();
        modes.dedup();
        modes
    }

    /// Returns the variants, deduplicated, always with Direct: every figure is relative to it.
    pub fn variants(&self, services: usize, path: Path) -> Vec<Variant> {
        let variants = self
            .plans(services, path)
            .flat_map(|plan| plan.variants)
            .copied();
        // A second build of kpx is measured only if it is selected.
        let other = |variant| {
            [variant]
                .into_iter()
                .chain((variant == Kpx && self.variants.contains(&KpxB)).then_some(KpxB))
        };
        let wanted = |variant: &Variant| *variant == Direct || wanted(&self.variants, variant);
        let mut variants: Vec<_> = variants.flat_map(other).filter(wanted).collect();
        variants.sort_unstable();
        variants.dedup();
        variants
    }

    fn all(&self) -> impl Iterator<Item = &'static Plan> {
        QUICK
            .iter()
            .chain(if self.is_quick { &[][..] } else { &REST[..] })
    }

    fn plans(&self, services: usize, path: Path) -> impl Iterator<Item = &'static Plan> {
        self.all()
            .filter(move |plan| plan.services.contains(&services) && plan.paths.contains(&path))
    }
}

fn wanted<T: PartialEq>(list: &[T], value: &T) -> bool {
    list.is_empty() || list.contains(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quick_run_measures_cells_of_whole_run() {
        let quick = Selection {
            is_quick: true,
            ..Selection::default()
        };
        let whole = Selection::default();
        assert_eq!(quick.services(), [MANY_SERVICES]);
        assert_eq!(whole.services(), [1, MANY_SERVICES, 50_000, MOST_SERVICES]);
        for path in quick.paths(MANY_SERVICES) {
            assert!(
                USUAL
                    .iter()
                    .chain(&YOUNG)
                    .all(|mode| quick.modes(MANY_SERVICES, path).contains(mode)),
                "{path}"
            );
            let all = whole.variants(MANY_SERVICES, path);
            assert!(
                quick
                    .variants(MANY_SERVICES, path)
                    .iter()
                    .all(|variant| all.contains(variant)),
                "{path}"
            );
        }
        assert_eq!(
            quick.variants(MANY_SERVICES, Path::Local),
            [Direct, Control, Nftables, Kpx, KpxOff, KpxSocketAll]
        );
        assert_eq!(
            quick
                .paths(MANY_SERVICES)
                .filter(|path| *path == Path::Overlay)
                .count(),
            0
        );
    }

    #[test]
    fn selection_keeps_direct() {
        let selection = Selection {
            variants: vec![Kpx],
            paths: vec![Path::Host],
            ..Selection::default()
        };
        assert_eq!(selection.variants(1, Path::Host), [Direct, Kpx]);
        assert_eq!(selection.paths(1).collect::<Vec<_>>(), [Path::Host]);
    }

    #[test]
    fn other_build_is_measured_where_it_is_named() {
        let selection = Selection {
            variants: vec![Kpx, KpxB],
            ..Selection::default()
        };
        assert_eq!(
            selection.variants(MANY_SERVICES, Path::Local),
            [Direct, Kpx, KpxB]
        );
        assert!(
            !Selection::default()
                .variants(MANY_SERVICES, Path::Local)
                .contains(&KpxB)
        );
    }
}
