//! How the latents of a frame's views lie side by side in one picture, and how one view is cut out of it again.
//!
//! Views are encoded one by one, so they are also cut apart before they are decoded: a decoder that saw the tile would
//! mix them along the seams.

use crate::config::Tile;
use crate::{Error, Result};
use std::ops::Range;

/// (rows, columns) in latent cells.
pub type Cells = (usize, usize);

/// The place of one view in a tile, in latent cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    pub top: usize,
    pub left: usize,
    pub height: usize,
    pub width: usize,
}

impl Region {
    /// Rows of the tile.
    pub fn rows(&self) -> Range<usize> {
        self.top..self.top + self.height
    }

    /// Columns of the tile.
    pub fn cols(&self) -> Range<usize> {
        self.left..self.left + self.width
    }
}

/// Where each view lies in a tile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    size: Cells,
    regions: Vec<Region>,
}

impl Layout {
    /// Arranges views, given by name and size in latent cells.
    ///
    /// # Errors
    /// `tile_size`, naming the view that does not fit the first one.
    pub fn new(tile: Tile, views: &[(&str, Cells)]) -> Result<Self> {
        let Some((first_name, (height, width))) = views.first().copied() else {
            return Err(Error::refused("tile_size", "a tile needs at least one view").in_place("data.views"));
        };
        let misfit = |view: &str, (rows, columns): Cells, wanted: String| {
            let what = format!("{view} has {rows}x{columns} latent cells where {wanted} are needed");
            Err(Error::refused("tile_size", what)
                .in_place("data.tile")
                .hint(format!("the first view, {first_name}, has {height}x{width}")))
        };
        if height == 0 || width == 0 {
            return misfit(first_name, (height, width), "one or more each way".into());
        }
        match tile {
            Tile::Row => {
                let mut regions = Vec::with_capacity(views.len());
                let mut left = 0;
                for (view, cells) in views.iter().copied() {
                    if cells.0 != height || cells.1 == 0 {
                        return misfit(view, cells, format!("{height} rows"));
                    }
                    regions.push(Region { top: 0, left, height, width: cells.1 });
                    left += cells.1;
                }
                Ok(Self { size: (height, left), regions })
            }
            Tile::RobotwinTshape => {
                let &[_, (left_name, left), (right_name, right)] = views else {
                    let what = format!("this tile has 3 views, the recipe names {}", views.len());
                    return Err(Error::refused("tile_size", what).in_place("data.views"));
                };
                for (view, cells) in [(left_name, left), (right_name, right)] {
                    if (2 * cells.0, 2 * cells.1) != (height, width) {
                        return misfit(view, cells, format!("{} by {}", height as f64 / 2.0, width as f64 / 2.0));
                    }
                }
                let wrist = |at| Region { top: 0, left: at, height: left.0, width: left.1 };
                let head = Region { top: left.0, left: 0, height, width };
                Ok(Self { size: (left.0 + height, width), regions: vec![head, wrist(0), wrist(left.1)] })
            }
        }
    }

    /// (height, width) of the tile in latent cells.
    pub fn size(&self) -> Cells {
        self.size
    }

    /// The place of a view; `None` if there is no such view.
    pub fn region(&self, view: usize) -> Option<Region> {
        self.regions.get(view).copied()
    }

    /// The places of all views, in the recipe's order.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }
}

/// Copies the latents [planes, height, width] of one view into its place of a tile [planes, `size`]; a plane is one
/// channel of one frame. Both slices must have these lengths.
pub fn place(tile: &mut [f32], size: Cells, region: Region, view: &[f32]) {
    let planes = tile.chunks_exact_mut(size.0 * size.1).zip(view.chunks_exact(region.height * region.width));
    for (tile, view) in planes {
        for (row, values) in region.rows().zip(view.chunks_exact(region.width)) {
            tile[row * size.1..][region.cols()].copy_from_slice(values);
        }
    }
}

/// The latents [planes, height, width] of one view out of a tile [planes, `size`]; undoes [`place`].
pub fn cut(tile: &[f32], size: Cells, region: Region) -> Vec<f32> {
    let planes = tile.chunks_exact(size.0 * size.1);
    planes.flat_map(|plane| region.rows().flat_map(move |row| &plane[row * size.1..][region.cols()])).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NAMES: [&str; 3] = ["head", "left", "right"];

    fn layout(tile: Tile, sizes: &[Cells]) -> Layout {
        Layout::new(tile, &NAMES.into_iter().zip(sizes.iter().copied()).collect::<Vec<_>>()).unwrap()
    }

    /// The published camera sizes: the tile, and rows and columns of each view.
    #[test]
    fn published_cameras_lie_where_the_public_training_puts_them() {
        type Place = (Range<usize>, Range<usize>);
        let check = |tile, sizes: &[Cells], size: Cells, places: &[Place]| {
            let layout = layout(tile, sizes);
            assert_eq!(layout.size(), size);
            let found: Vec<Place> = layout.regions().iter().map(|region| (region.rows(), region.cols())).collect();
            assert_eq!(found, places);
        };
        check(
            Tile::RobotwinTshape,
            &[(16, 20), (8, 10), (8, 10)],
            (24, 20),
            &[(8..24, 0..20), (0..8, 0..10), (0..8, 10..20)],
        );
        check(Tile::Row, &[(8, 8), (8, 8)], (8, 16), &[(0..8, 0..8), (0..8, 8..16)]);
        check(Tile::Row, &[(16, 16), (16, 16)], (16, 32), &[(0..16, 0..16), (0..16, 16..32)]);
        check(
            Tile::Row,
            &[(14, 20), (14, 20), (14, 20)],
            (14, 60),
            &[(0..14, 0..20), (0..14, 20..40), (0..14, 40..60)],
        );
    }

    proptest! {
        /// The four published layouts: what is placed is cut out again, and every cell of the tile belongs to a view.
        #[test]
        fn a_view_comes_back_out_of_the_tile(which in 0..4_usize, planes in 1..4_usize) {
            let layout = match which {
                0 => layout(Tile::RobotwinTshape, &[(16, 20), (8, 10), (8, 10)]),
                1 => layout(Tile::Row, &[(8, 8); 2]),
                2 => layout(Tile::Row, &[(16, 16); 2]),
                _ => layout(Tile::Row, &[(14, 20); 3]),
            };
            let size = layout.size();
            let mut tile = vec![f32::NAN; planes * size.0 * size.1];
            let views: Vec<Vec<f32>> = layout.regions().iter().enumerate().map(|(view, region)| {
                (0..planes * region.height * region.width).map(|at| (view * 100_000 + at) as f32).collect()
            }).collect();
            for (region, view) in layout.regions().iter().zip(&views) {
                place(&mut tile, size, *region, view);
            }
            prop_assert!(tile.iter().all(|value| !value.is_nan()));
            for (region, view) in layout.regions().iter().zip(&views) {
                prop_assert_eq!(&cut(&tile, size, *region), view);
                // Row by row, by the definition of the tile.
                let last = (planes - 1) * size.0 * size.1 + (region.rows().end - 1) * size.1 + region.cols().end - 1;
                prop_assert_eq!(tile[last], view[view.len() - 1]);
            }
        }
    }

    #[test]
    fn a_view_that_does_not_fit_is_named() {
        let new = |tile, sizes: &[Cells]| {
            Layout::new(tile, &NAMES.into_iter().zip(sizes.iter().copied()).collect::<Vec<_>>()).unwrap_err()
        };
        let error = new(Tile::Row, &[(8, 8), (8, 8), (16, 8)]);
        assert_eq!(error.code, "tile_size");
        assert!(error.what.contains("right has 16x8"), "{error}");
        assert!(new(Tile::RobotwinTshape, &[(16, 20), (16, 20), (8, 10)]).what.contains("left has 16x20"));
        assert!(new(Tile::RobotwinTshape, &[(15, 20), (7, 10), (7, 10)]).what.contains("left has 7x10"));
        assert_eq!(new(Tile::RobotwinTshape, &[(16, 20), (8, 10)]).code, "tile_size");
        assert_eq!(new(Tile::Row, &[]).code, "tile_size");
    }
}
