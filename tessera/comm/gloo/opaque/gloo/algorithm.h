#include <gloo/stand_in.h>
